"""Dropout whose masks are a function of (seed, step, sample, module), not of a generator's state.

The same row in the same step gets the same mask whatever the micro-batch, the padding, the rank, gradient
checkpointing or a resume.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from twinkle_research.errors import UserError
from twinkle_research.randomness import derive_seed


@dataclass(frozen=True)
class DropoutKey:
    """Where the tokens of one micro-batch lie and what names their masks."""

    step: int
    shape: tuple[int, int]  # rows, positions
    documents: tuple[tuple[int, slice, int], ...]  # row, positions in it, sample index in the step


@dataclass
class DropoutState:
    """Shared by all KeyedDropout modules of a model; ``key`` is set before each forward and each backward."""

    seed: int
    key: DropoutKey | None = field(default=None)


class KeyedDropout(nn.Module):
    """In place of nn.Dropout. Takes [B, T, ...], [B * T, ...] or [B, 1, T, ...] inputs of the micro-batch that ``state.key``
    describes."""

    def __init__(self, p: float, name: str, state: DropoutState) -> None:
        super().__init__()
        self.p = p
        self.name = name
        self.state = state

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        key = self.state.key
        if key is None:
            raise UserError(f"dropout of {self.name} ran in training mode outside forward_backward: its mask has no key")
        features = self._features(x, key)
        if features is None:
            raise UserError(
                f"dropout of {self.name} cannot be keyed: its input {tuple(x.shape)} is not laid out by row and position "
                f"{key.shape}; set the dropout to 0 or leave this module out"
            )
        return x * self._mask(x, features, key)

    @staticmethod
    def _features(x: Tensor, key: DropoutKey) -> torch.Size | None:
        """What each position has."""
        rows, length = key.shape
        for layout in (key.shape, (rows * length,), (rows, 1, length)):
            if x.shape[: len(layout)] == layout:
                return x.shape[len(layout) :]
        return None

    def _mask(self, x: Tensor, features: torch.Size, key: DropoutKey) -> Tensor:
        mask = torch.ones(*key.shape, *features, dtype=x.dtype, device=x.device)
        for row, where, sample in key.documents:
            shape = (where.stop - where.start, *features)
            mask[row, where] = document_mask(self.p, self.state.seed, key.step, sample, self.name, shape, x)
        return mask.view(x.shape)

    def extra_repr(self) -> str:
        return f"p={self.p}, name={self.name}"


def document_mask(p: float, seed: int, step: int, sample: int, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """[tokens, ...]: 0 with probability ``p``, else 1 / (1 - p); the mask of one row in the module ``name``."""
    generator = torch.Generator(device=like.device).manual_seed(derive_seed(seed, "dropout", step, sample, name))
    draw = torch.rand(shape, generator=generator, device=like.device)
    return (draw >= p).to(like.dtype).div_(1.0 - p)


def key_dropout(model: nn.Module, state: DropoutState, rename: Callable[[str], str] = str) -> list[str]:
    """Replaces every nn.Dropout with p > 0 by a KeyedDropout; returns their names, which after ``rename`` key the masks.

    Dropout inside a fused attention kernel, or applied by a function, cannot be keyed: ``unkeyed_dropout`` finds it.
    """
    found = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Dropout) and m.p > 0]
    for name, module in found:
        parent, _, child = name.rpartition(".")
        owner = model.get_submodule(parent)
        keyed = KeyedDropout(module.p, rename(name), state)
        keyed.train(module.training)
        if isinstance(owner, (nn.ModuleDict, nn.ModuleList, nn.Sequential)):
            owner._modules[child] = keyed
        else:
            setattr(owner, child, keyed)
    return [name for name, _ in found]


def zero_functional_dropout(model: nn.Module) -> list[str]:
    """Sets dropout rates that modules keep as plain numbers (attention, F.dropout) to 0; returns which were not."""
    found = []
    for name, module in model.named_modules():
        if isinstance(module, (nn.Dropout, KeyedDropout)):
            continue
        for attribute, value in vars(module).items():
            if "drop" in attribute and isinstance(value, float) and value > 0:
                setattr(module, attribute, 0.0)
                found.append(f"{name}.{attribute}" if name else attribute)
    return found
