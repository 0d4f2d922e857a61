"""Gradient sums of an open accumulation window, in float32 also for low-precision parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from twinkle_research.model.layout import WHOLE, Layout

if TYPE_CHECKING:
    from twinkle_research.distributed.runtime import Runtime

BUCKET_BYTES = 64 * 2**20  # of one flat buffer; bounds the memory of a reduction


class Gradients:
    """Collects what backward passes add to ``parameters`` (name -> parameter that requires grad).

    Float32 (and float64) parameters accumulate in ``.grad`` as usual. Those of lower precision get a float32 buffer:
    each backward's gradient is added to it and freed, so that many micro-batches do not round many times.
    A parameter that ``layout`` shards is this rank's part; its backward passes give sums over all ranks already.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], layout: Layout = WHOLE) -> None:
        self.parameters = dict(parameters)
        self._sharded = {name for name in self.parameters if layout.is_sharded(name)}
        self._buffers: dict[str, Tensor] = {}
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._adder(name))
            for name, parameter in self.parameters.items()
            if is_low_precision(parameter)
        ]

    def _adder(self, name: str):
        def add(parameter: Tensor) -> None:
            if name in self._buffers:
                self._buffers[name].add_(parameter.grad)
            else:
                self._buffers[name] = parameter.grad.float()
            parameter.grad = None

        return add

    def tensors(self) -> dict[str, Tensor]:
        """name -> gradient sum. A parameter that nothing reached has a gradient of zeros, on every rank alike."""
        for name, parameter in self.parameters.items():
            if is_low_precision(parameter):
                if name not in self._buffers:
                    self._buffers[name] = torch.zeros_like(parameter, dtype=torch.float32)
            elif parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return {name: self._buffers.get(name, p.grad) for name, p in self.parameters.items()}

    def all_reduce(self, runtime: Runtime) -> None:
        """Sums over ranks, in flat buckets. Collective."""
        if runtime.world_size == 1:
            return
        for bucket in _buckets([g for name, g in self.tensors().items() if name not in self._sharded]):
            flat = runtime.all_reduce_sum(torch.cat([g.reshape(-1) for g in bucket]))
            parts = flat.split([g.numel() for g in bucket])
            torch._foreach_copy_(bucket, [part.view(g.shape) for part, g in zip(parts, bucket, strict=True)])

    def norm(self, runtime: Runtime, norm_type: float = 2) -> float:
        """Global norm over all parameters. Collective."""
        gradients = self.tensors()
        norm = _norm([g for name, g in gradients.items() if name not in self._sharded], norm_type)
        if not self._sharded:
            return norm
        parts = runtime.gather_objects(_norm([gradients[name] for name in sorted(self._sharded)], norm_type))
        return float(torch.linalg.vector_norm(torch.tensor([norm, *parts], dtype=torch.float64), norm_type))

    def scale_(self, factor: float) -> None:
        if factor != 1.0:
            torch._foreach_mul_(list(self.tensors().values()), factor)

    def clear(self) -> None:
        self._buffers.clear()
        for parameter in self.parameters.values():
            parameter.grad = None

    def consolidate(self, runtime: Runtime) -> None:
        """Leaves the sum over ranks on rank 0 alone: what is added afterwards, on any rank, adds to it. Those of sharded
        parameters are sums already. Collective."""
        self.all_reduce(runtime)
        for name, parameter in self.parameters.items():
            if not runtime.is_main and name not in self._sharded:
                self._buffers.pop(name, None)
                parameter.grad = None

    def restore(self, name: str, gradient: Tensor, runtime: Runtime) -> None:
        """Adds a sum that ``consolidate`` left (of a sharded parameter this rank's part) where it was."""
        if runtime.is_main or name in self._sharded:
            self.tensors()[name].add_(gradient)

    def close(self) -> None:
        """Forgets the parameters; their gradients no longer come here."""
        self.clear()
        for hook in self._hooks:
            hook.remove()


def is_low_precision(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.bfloat16, torch.float16)


def _norm(tensors: list[Tensor], norm_type: float) -> float:
    filled = [tensor for tensor in tensors if tensor.numel()]
    return float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(filled, norm_type)), norm_type)) if filled else 0.0


def _buckets(tensors: list[Tensor]) -> list[list[Tensor]]:
    buckets: list[list[Tensor]] = []
    room = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if not buckets or size > room or buckets[-1][0].dtype != tensor.dtype:
            buckets.append([])
            room = BUCKET_BYTES
        buckets[-1].append(tensor)
        room -= size
    return buckets
