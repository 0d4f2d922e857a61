"""A KV cache of transformers that grows in place: a token's keys and values are written, those before it are not copied."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

_ROOM = 64  # tokens for which a buffer has room beyond what it holds, at least


class _Slab(DynamicLayer):
    """``keys`` and ``values`` [B, H, tokens so far, D] are the filled parts of buffers that are larger in B and in tokens."""

    def __init__(self) -> None:
        super().__init__()
        self._buffers: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if self._buffers is None:  # prompts: most often their rows are repeated next, so they get no room yet
            self.dtype, self.device, self.is_initialized = key_states.dtype, key_states.device, True
            self._buffers = self.keys, self.values = key_states, value_states
            return self.keys, self.values
        start = self.keys.shape[2]
        end = start + key_states.shape[2]
        if end > self._buffers[0].shape[2]:
            self._move(self.keys, self.values, room=max(_ROOM, start // 4, end - start))
        rows = len(key_states)
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:rows, :, start:end] = new
        self._show(rows, end)
        return self.keys, self.values

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self._buffers is not None:
            self._move(self.keys, self.values, room=_ROOM, rows=beam_idx)

    def close_up(self, rows: list[int]) -> None:
        """Keeps these rows: each is in its place already, or comes from behind those that stay."""
        for i, row in enumerate(rows):
            if row != i:
                self.keys[i] = self.keys[row]
                self.values[i] = self.values[row]
        self._show(len(rows), self.keys.shape[2])

    def _move(self, keys: Tensor, values: Tensor, room: int, rows: Tensor | None = None) -> None:
        """Into larger buffers; ``rows`` [B]: which, in which order."""
        moved = []
        for old in (keys, values):
            count, heads, length, size = old.shape
            new = old.new_empty(count if rows is None else len(rows), heads, length + room, size)
            if rows is None:
                new[:, :, :length] = old
            else:
                torch.index_select(old, 0, rows, out=new[:, :, :length])
            moved.append(new)
        self._buffers = (moved[0], moved[1])
        self._show(len(moved[0]), keys.shape[2])

    def _show(self, rows: int, length: int) -> None:
        self.keys, self.values = (buffer[:rows, :, :length] for buffer in self._buffers)


class SlabCache(DynamicCache):
    """As DynamicCache, which says what each layer of a model keeps; layers that keep all tokens do so in slabs."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.layers = [_Slab() if type(layer) is DynamicLayer else layer for layer in self.layers]

    def close_up(self, rows: list[int], index: Tensor) -> None:
        """Keeps these rows (``index`` has the same); row i is i, or comes from behind those that stay."""
        for layer in self.layers:
            if isinstance(layer, _Slab):
                layer.close_up(rows)
            else:
                layer.reorder_cache(index)
