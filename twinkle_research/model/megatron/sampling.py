"""A transformers model with the present weights, to generate with where there is no vLLM: Megatron-Core's layers keep no cache
of keys and values. Each process has the whole model once more, so this is for small ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from twinkle_research.checkpoint.stream import TensorSpec
from twinkle_research.model.transformers.loading import load_model
from twinkle_research.model.transformers.names import DiskNames

if TYPE_CHECKING:
    from pathlib import Path


class SamplingCopy:
    """``folder``: the model's own."""

    def __init__(self, folder: str | Path, dtype: torch.dtype, device: torch.device, trust_remote_code: bool) -> None:
        self.module: nn.Module = load_model(folder, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
        self._parameters = {name: p.data for name, p in self.module.named_parameters()}
        self._names = DiskNames(self.module, {name: p.shape for name, p in self._parameters.items()})

    @torch.no_grad()
    def update(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """``weights``: all tensors of the folder, by name."""
        held = _Held(dict(weights))
        for name, tensor in self._names.parts_from_disk(held, self._parameters, lambda name: slice(None)):
            self._parameters[name].copy_(tensor)


class _Held:
    """Tensors in memory, with what is asked of a TensorFolder."""

    path = "the model in memory"

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def spec(self, name: str) -> TensorSpec:
        return TensorSpec.of(name, self._tensors[name])

    def part(self, name: str, rows: slice) -> Tensor:
        return self._tensors[name][rows]

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]
