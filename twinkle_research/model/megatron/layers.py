"""The layers that Megatron-Core has no portable version of: a norm that knows sequence parallelism, and attention inside
documents on any device, with context parallelism.

Both stand where Transformer Engine's would on a GPU, and have the same parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Zhang & Sennrich 2019 (arXiv:1910.07467), rounded where transformers rounds it."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device()))
        # Each rank sees its part of the sequence only: mcore sums the gradients of weights with this mark over the ranks.
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float32:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        exact = x.float()
        exact = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * exact.to(x.dtype)


class CenteredRMSNorm(RMSNorm):
    """Gemma's: the weight is stored as its difference from 1, and the product is rounded."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(config, hidden_size, eps)
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        weight = 1.0 + self.weight.float()
        if x.dtype == torch.float32:
            return F.rms_norm(x, self.weight.shape, weight, self.eps)
        exact = x.float()
        return (exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + self.eps) * weight).to(x.dtype)


class DocumentAttention(MegatronModule):
    """Causal attention of packed documents, each by itself; the interface is that of TEDotProductAttention. thd batches only.

    ``window``: tokens that a token sees, itself included; None: all before it. ``softcap`` c maps scores to c * tanh(s / c),
    with one matrix of them for a run of documents in memory (Gemma 2, arXiv:2408.00118). With context parallelism a rank has the
    chunks r and 2c - 1 - r of the 2c equal ones of each document, and gathers keys and values.
    """

    def __init__(
        self, config: TransformerConfig, layer_number: int, attn_mask_type: Any, attention_type: str, *,
        attention_dropout: float | None = None, softmax_scale: float | None = None, cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None, window: int | None = None,
        softcap: float | None = None, **_: Any,
    ) -> None:  # fmt: skip
        super().__init__(config=config)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["cp"])
        self.context = groups.cp
        self.scale = softmax_scale
        self.window = window
        self.softcap = softcap

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, attn_mask_type: Any = None,
        attention_bias: Tensor | None = None, packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:  # fmt: skip
        """query [T, H, D], key and value [T, G, D] -> [T, H * D]."""
        lengths = torch.diff(packed_seq_params.cu_seqlens_q).tolist()
        size, rank = self.context.size(), self.context.rank()
        if size == 1:
            done = [self._whole(*parts) for parts in _equal_runs(lengths, query, key, value)]
        else:
            key, value = (_gathered(x, lengths, self.context) for x in (key, value))
            done = []
            chunks = zip(own_chunks(lengths, size, rank), _split(query, lengths, size), strict=True)
            for ((document, offset), width), q in chunks:
                seen = slice(document, document + offset + width)
                done.append(self._chunk(q, key[seen], value[seen]))
        return torch.cat(done).flatten(1)

    def _whole(self, count: int, length: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """``count`` documents of ``length`` tokens, one after the other."""
        q, k, v = (x.unflatten(0, (count, length)).transpose(1, 2) for x in (q, k, v))  # [documents, heads, length, D]
        mask = None
        if self.window is not None and length > self.window:
            mask = _visible(length, length, self.window, q.device)
        return self._attend(q, k, v, mask).transpose(1, 2).flatten(0, 1)

    def _chunk(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The last tokens of a document's part."""
        mask = _visible(len(q), len(k), self.window, q.device)
        return self._attend(*(x.transpose(0, 1)[None] for x in (q, k, v)), mask)[0].transpose(0, 1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        if groups > 1:
            k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        if self.softcap is not None:
            visible = _visible(q.shape[2], k.shape[2], None, q.device) if mask is None else mask
            scores = torch.tanh(q @ k.transpose(2, 3) * self.scale / self.softcap) * self.softcap
            return scores.masked_fill(~visible, -torch.inf).softmax(-1, dtype=torch.float32).to(q.dtype) @ v
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale)


def _visible(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """[queries, keys], True where the query (the last ``queries`` of the keys' positions) sees the key."""
    age = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)
    return (age >= 0) if window is None else (age >= 0) & (age < window)


def _equal_runs(lengths: list[int], *tensors: Tensor) -> Iterator[tuple[Any, ...]]:
    """(documents, length, their part of each tensor) for runs of documents of one length."""
    runs = [(len(list(group)), length) for length, group in groupby(lengths)]
    parts = zip(*(tensor.split([count * length for count, length in runs]) for tensor in tensors), strict=True)
    for run, part in zip(runs, parts, strict=True):
        yield *run, *part


# --- context parallelism ----------------------------------------------------------------------------------------------


def own_chunks(lengths: list[int], size: int, rank: int) -> Iterator[tuple[tuple[int, int], int]]:
    """((first position of the document, offset in it), tokens) of the chunks that ``rank`` has, in its order."""
    document = 0
    for length in lengths:
        width = length // (2 * size)
        for chunk in (rank, 2 * size - 1 - rank):
            yield (document, chunk * width), width
        document += length


def own_positions(lengths: list[int], size: int, rank: int) -> Tensor:
    """[T / size] positions of the whole batch that ``rank`` has, in its order. ``lengths``: multiples of 2 * size."""
    if size == 1:
        return torch.arange(sum(lengths))
    return torch.cat([torch.arange(d + o, d + o + width) for (d, o), width in own_chunks(lengths, size, rank)])


def _split(query: Tensor, lengths: list[int], size: int) -> tuple[Tensor, ...]:
    return query.split([length // (2 * size) for length in lengths for _ in range(2)])


def _gathered(x: Tensor, lengths: list[int], group: torch.distributed.ProcessGroup) -> Tensor:
    """All ranks' parts in the order of the whole batch; the gradient goes back to where they came from, summed."""
    everything = gather_from_sequence_parallel_region(x.contiguous(), tensor_parallel_output_grad=True, group=group)
    places = torch.cat([own_positions(lengths, group.size(), rank) for rank in range(group.size())])
    return everything.index_select(0, torch.argsort(places).to(x.device))
