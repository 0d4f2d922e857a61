"""Which elements of a parameter the processes of a data-parallel group update each, under the distributed optimizer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor, nn


@dataclass(frozen=True)
class Ranges:
    """``parts``: (rank in ``group``, start, stop) in the flattened parameter; together they are all of it."""

    group: dist.ProcessGroup
    parts: tuple[tuple[int, int, int], ...]

    @property
    def own(self) -> slice:
        """This process's; empty where it has none."""
        rank = dist.get_rank(self.group)
        return next((slice(start, stop) for owner, start, stop in self.parts if owner == rank), slice(0, 0))

    def whole(self, shape: torch.Size, own: Tensor) -> Tensor:
        """All of the tensor whose ``own`` range each process gives; bits are moved, nothing is computed. Collective in the
        group."""
        gathered = own.new_empty(shape.numel())
        gathered[self.own].copy_(own.reshape(-1))
        for owner, start, stop in self.parts:
            dist.broadcast(gathered[start:stop], group=self.group, group_src=owner)
        return gathered.view(shape)


def ranges_of(wrapped: Iterable[DistributedDataParallel]) -> dict[nn.Parameter, Ranges]:
    """As DistributedOptimizer divides them: each bucket into equal parts, wherever parameters begin and end."""
    found = {}
    for chunk in wrapped:
        for buffer in chunk.buffers + chunk.expert_parallel_buffers:
            group = buffer.data_parallel_group
            for parameter, (start, stop, number) in buffer.param_index_map.items():
                bucket = buffer.buckets[number]
                size = bucket.grad_data.numel() // group.size()
                cuts = ((rank, bucket.offset + rank * size) for rank in range(group.size()))
                parts = ((rank, max(start, cut) - start, min(stop, cut + size) - start) for rank, cut in cuts)
                found[parameter] = Ranges(group, tuple(part for part in parts if part[1] < part[2]))
    return found
