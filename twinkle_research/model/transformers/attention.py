"""Attention of packed rows: each document is attended to by itself, exactly as if it stood alone in its row.

transformers would build one [T, T] mask for the row. Here torch's scaled_dot_product_attention runs on each document, so
the cost is the sum of the squares of the documents' lengths, and no mask is needed but for sliding windows. Flash
attention does the same itself, from positions that restart (its varlen kernels); eager attention uses transformers' mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from twinkle_research.errors import ConfigError
from twinkle_research.processor.base import Batch

if TYPE_CHECKING:
    from transformers import PretrainedConfig

NAME = "twinkle_packed_sdpa"

# Lengths of the documents of the forward pass that runs now, row after row, padding included.
_lengths: ContextVar[tuple[int, ...] | None] = ContextVar("lengths", default=None)


@dataclass(frozen=True)
class _Documents:
    """What layers get in place of a mask."""

    lengths: tuple[int, ...]
    window: int | None  # tokens that a token sees, itself included

    def mask(self, length: int, device: torch.device) -> Tensor | None:
        """[1, 1, length, length]; None where causal attention needs no mask."""
        if self.window is None or length <= self.window:
            return None
        age = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
        return ((age >= 0) & (age < self.window))[None, None]


def _make_mask(config: PretrainedConfig, local_size: int | None = None, **settings: Any) -> _Documents:
    """transformers asks for one for each kind of layer; ``local_size`` is the window of sliding ones."""
    return _Documents(_lengths.get(), local_size)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: _Documents | None, **settings: Any
) -> tuple[Tensor, None]:
    """query [B, H, T, D] (key and value may have fewer heads) -> [B, T, H, D]."""
    if not isinstance(attention_mask, _Documents):
        raise ConfigError(f"{type(module).__name__} builds masks of its own, so it cannot keep packed documents apart")
    rows, _, width, _ = query.shape
    runs = [(length, len(list(group))) for length, group in groupby(attention_mask.lengths)]
    sizes = [length * count for length, count in runs]
    parts = [tensor.transpose(0, 1).flatten(1, 2).split(sizes, dim=1) for tensor in (query, key, value)]  # [H, B * T, D]
    done = []
    for (length, count), *qkv in zip(runs, *parts, strict=True):
        # Documents of one length together: [documents, H, length, D]
        q, k, v = (part.unflatten(1, (count, length)).transpose(0, 1) for part in qkv)
        out, _ = sdpa_attention_forward(module, q, k, v, attention_mask.mask(length, query.device), **settings)
        done.append(out.flatten(0, 1))  # [documents * length, H, D]
    return torch.cat(done).unflatten(0, (rows, width)), None


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, _make_mask)


def document_lengths(batch: Batch) -> tuple[int, ...]:
    """Lengths of what lies side by side in the flattened batch: sequences, and runs of padding."""
    parts = 2 * batch.sequence_ids + batch.attention_mask
    return tuple(torch.unique_consecutive(parts.reshape(-1), return_counts=True)[1].tolist())


@contextmanager
def packed_attention(config: PretrainedConfig, lengths: tuple[int, ...] | None) -> Iterator[None]:
    """While it is open the model attends inside documents. Also around a backward pass: gradient checkpointing runs the
    layers again. ``lengths=None``: the batch is not packed, nothing changes."""
    text = config.get_text_config()  # a vision tower keeps its own
    if lengths is None or text._attn_implementation != "sdpa":
        yield
        return
    token = _lengths.set(lengths)
    text._attn_implementation = NAME
    try:
        yield
    finally:
        text._attn_implementation = "sdpa"
        _lengths.reset(token)
