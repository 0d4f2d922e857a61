"""How the tensors that a model trains and stores lie on the ranks: whole on each, or each rank's own rows of them.

Independent of transformers: optimizer, gradients and checkpoints ask a layout, not the library that made the shards.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from twinkle_research.distributed.runtime import Runtime


class Layout:
    """Every tensor is whole on every rank. ``name`` is always the tensor's name in memory."""

    def is_sharded(self, name: str) -> bool:
        return False

    def shape(self, name: str, tensor: Tensor) -> torch.Size:
        """Shape of the whole tensor, of which ``tensor`` is this rank's part."""
        return tensor.shape

    def dtype(self, name: str, tensor: Tensor) -> torch.dtype:
        """What the tensor is stored and computed in; where it is narrower than ``tensor``, that is its master."""
        return tensor.dtype

    def rows(self, name: str) -> slice:
        """This rank's rows of the whole tensor."""
        return slice(None)

    def whole(self, name: str, tensor: Tensor) -> Tensor:
        """The whole tensor, of which ``tensor`` is this rank's part. Collective."""
        return tensor

    def release(self) -> None:
        """Forgets copies of weights that are about to change, or have."""


WHOLE = Layout()


class RowShards(Layout):
    """The tensors that ``shapes`` names are cut along their first dimension into equal parts of ceil(rows / ranks), the last
    ones shorter or empty (torch's ``chunk``, as FSDP2 does). Others are whole.

    ``dtype``: what the cut tensors are computed in.
    """

    def __init__(self, runtime: Runtime, shapes: Mapping[str, torch.Size], dtype: torch.dtype) -> None:
        self._runtime = runtime
        self._shapes = dict(shapes)
        self._dtype = dtype

    def is_sharded(self, name: str) -> bool:
        return name in self._shapes

    def shape(self, name: str, tensor: Tensor) -> torch.Size:
        return self._shapes.get(name, tensor.shape)

    def dtype(self, name: str, tensor: Tensor) -> torch.dtype:
        return self._dtype if name in self._shapes else tensor.dtype

    def rows(self, name: str) -> slice:
        if name not in self._shapes:
            return slice(None)
        total = self._shapes[name][0]
        size = self._rows_per_rank(total)
        start = min(self._runtime.rank * size, total)
        return slice(start, min(start + size, total))

    def _rows_per_rank(self, total: int) -> int:
        return -(-total // self._runtime.world_size)

    def whole(self, name: str, tensor: Tensor) -> Tensor:
        if name not in self._shapes:
            return tensor
        gathered = tensor.new_empty(self._shapes[name])
        # Not all_gather: that of gloo takes the room of the whole tensor a second time.
        for rank, part in enumerate(gathered.split(self._rows_per_rank(len(gathered)))):
            if rank == self._runtime.rank:
                part.copy_(tensor.detach())
            dist.broadcast(part, src=rank)
        return gathered
