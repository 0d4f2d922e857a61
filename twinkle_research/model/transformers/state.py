"""Weights, optimizer and open window of a TransformersModel, to and from a checkpoint, one tensor at a time.

Under any layout a rank holds its own part of what it stores, and beside it no more than one whole tensor (some times that
where transformers keeps it in another form than on disk, as the stacked experts of a mixture).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from twinkle_research.checkpoint.stream import TensorSpec
from twinkle_research.model.state import ModelState, Part, Stored
from twinkle_research.model.transformers.lora import tied_names
from twinkle_research.model.transformers.names import DiskNames

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig

    from twinkle_research.model.transformers.model import TransformersModel


class TransformersState(ModelState):
    """``aliases``: further names on disk of weights that have several -> their name in memory."""

    def __init__(self, model: TransformersModel, adapter_name: str | None = None, among_others: bool = False) -> None:
        super().__init__(model, model.trained(adapter_name), among_others)
        self._module = model.module
        self._dtype = model.dtype
        self._layout = self._training.layout
        self.weights: dict[str, Tensor]
        self.aliases: dict[str, str] = {}
        if self._run.name:
            self.weights = self._policy
            self.aliases = tied_names(model.module, self._run.name)
        else:
            self.weights = self._policy | _buffers(model.module)
        shapes = {name: self._layout.shape(name, tensor) for name, tensor in self.weights.items()}
        others = {name: tensor.shape for name, tensor in self._critic.items()}
        others |= {alias: shapes[name] for alias, name in self.aliases.items()}
        self.names = DiskNames(None if self._run.name else model.module, shapes, others)

    # --- names and parts ----------------------------------------------------------------------------------------

    def _stored(self, stored: Stored) -> tuple[list[TensorSpec], Iterable[tuple[str, Tensor]]]:
        dtype_of = stored.dtype_of or (lambda name: stored.tensor_of(name).dtype)
        specs = self.names.specs({name: dtype_of(name) for name in stored.names}, stored.suffix)
        whole = self.names.to_disk(lambda name: self._layout.whole(name, stored.tensor_of(name)), stored.names)
        return specs, ((name + stored.suffix, tensor) for name, tensor in whole)

    def _as_stored(self, names: Collection[str]) -> Stored:
        """As the model computes with them, not as their masters."""

        def dtype_of(name: str) -> torch.dtype:
            return self._layout.dtype(name, self.weights[name])

        return Stored(names, lambda name: self.weights[name].detach().to(dtype_of(name)), dtype_of=dtype_of)

    def _stored_weights(self) -> list[Stored]:
        again = Stored(self.aliases, lambda alias: self.weights[self.aliases[alias]])
        return [*super()._stored_weights(), again]

    def _check(self, part: Part) -> None:
        self.names.check(part.tensors, part.wanted, part.suffix)

    def _own_parts(self, part: Part) -> Iterator[tuple[str, Tensor]]:
        return self.names.parts_from_disk(part.tensors, part.wanted, self._layout.rows, part.suffix)

    def _on_disk(self, name: str) -> list[str]:
        return self.names.of(name)

    def _weight_names(self) -> set[str]:
        return {on_disk for name in self.weights for on_disk in self.names.of(name)}

    def _trained_names(self) -> set[str]:
        return {on_disk for name in self._training.parameters for on_disk in self.names.of(name)}

    def _may_be_there(self, name: str) -> bool:
        return name in self.aliases

    # --- what stands beside the tensors -------------------------------------------------------------------------

    def _configs(self) -> tuple[PretrainedConfig, GenerationConfig | None]:
        config = self._module.config
        config.architectures = [class_name(self._module)]
        config.dtype = str(self._dtype).removeprefix("torch.")
        return config, self._module.generation_config


def class_name(module: torch.nn.Module) -> str:
    """transformers' name of the model's class; sharding puts its own before it."""
    return type(module).__name__.removeprefix("FSDP")


def _buffers(module: torch.nn.Module) -> dict[str, Tensor]:
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    return {name: tensor for name, tensor in module.state_dict(keep_vars=True).items() if name not in parameters}
