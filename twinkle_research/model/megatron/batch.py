"""A collated batch as one run of documents (thd), and the part of it that this process computes.

Padding of the batch is left out: each of its sequences is a document. What the layout needs is added: under context
parallelism each document is filled up to a multiple of 2 c, and a last document of nothing else makes the whole divisible.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from twinkle_research.data_format import IGNORE_INDEX
from twinkle_research.errors import UserError
from twinkle_research.model.megatron.layers import own_positions
from twinkle_research.model.megatron.tokens import KeyedSeqParams, LocalTokens
from twinkle_research.model.microbatch import MicroBatch
from twinkle_research.processor.base import Batch


@dataclass
class LocalBatch(MicroBatch):
    """``ids_T``: the tokens that this process has, padding 0, as they are before sequence parallelism cuts them once more.
    ``lengths``: of the documents of the whole batch, what fills them up included. n counts the trained positions here."""

    context: int  # processes that share each document
    lengths: tuple[int, ...]
    ids_T: Tensor  # CPU int64
    where_T: Tensor  # CPU int64, index among the real tokens of the batch, -1 on padding
    rows_n: Tensor  # CPU int64, index into T
    places_n: Tensor  # CPU int64, index into the flattened [B * T], ascending

    def inputs_on(self, device: torch.device) -> tuple[Tensor, KeyedSeqParams]:
        """[1, T] token ids, and what mcore's layers are told of the documents."""
        ends = torch.tensor((0, *self.lengths), dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
        longest = max(self.lengths)
        key = self.dropout_key
        documents = tuple((sample, where.stop - where.start) for _, where, sample in key.documents)
        params = KeyedSeqParams(
            qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, cu_seqlens_q_padded=ends, cu_seqlens_kv_padded=ends,
            max_seqlen_q=longest, max_seqlen_kv=longest, tokens=LocalTokens(documents, self.where_T.to(device), key.step),
        )  # fmt: skip
        return self.ids_T[None].to(device), params

    def fill_up(self, total: int) -> None:
        """Adds padding until the whole batch has ``total`` tokens; what it has and ``total`` are multiples of what the layout
        needs."""
        more = total - sum(self.lengths)
        if more:
            self.lengths = (*self.lengths, more)
            here = more // self.context
            self.ids_T = torch.cat((self.ids_T, self.ids_T.new_zeros(here)))
            self.where_T = torch.cat((self.where_T, self.where_T.new_full((here,), -1)))


def local_parts(batch: Batch, rank: int, context: int, multiple: int) -> dict[str, Any]:
    """The fields that LocalBatch adds to MicroBatch, for the ``rank`` of ``context`` processes that share each document.
    ``multiple``: of the number of tokens that each of them gets. Raises UserError where positions do not count up by one."""
    places_R = batch.attention_mask.view(-1).nonzero().squeeze(-1)  # of the R real tokens
    lengths_S = torch.unique_consecutive(batch.sequence_ids.view(-1)[places_R], return_counts=True)[1]
    _check_positions(batch, places_R, lengths_S)
    each = 2 * context if context > 1 else 1
    padded_S = -(-lengths_S // each) * each
    # Documents begin later than their tokens did by what fills up those before them.
    filled_S = (padded_S - lengths_S).cumsum(0) - (padded_S - lengths_S)
    slots_R = torch.arange(len(places_R)) + filled_S.repeat_interleave(lengths_S)
    total = int(padded_S.sum())
    rest = -total % math.lcm(each, context * multiple)
    lengths = (*padded_S.tolist(), *([rest] if rest else []))

    where = torch.full((total + rest,), -1)
    where[slots_R] = torch.arange(len(places_R))
    where_T = where[own_positions(lengths, context, rank)]
    here_T = where_T >= 0
    places_T = places_R[where_T.clamp(min=0)]
    rows_n = (here_T & (batch.labels.view(-1)[places_T] != IGNORE_INDEX)).nonzero().squeeze(-1)
    ids_T = batch.input_ids.view(-1)[places_T].where(here_T, 0)
    return {
        "context": context, "lengths": lengths, "ids_T": ids_T, "where_T": where_T, "rows_n": rows_n,
        "places_n": places_T[rows_n],
    }  # fmt: skip


def _check_positions(batch: Batch, places_R: Tensor, lengths_S: Tensor) -> None:
    """mcore numbers the tokens of a document itself. Where the count begins makes no difference to rotary embeddings."""
    steps = torch.diff(batch.position_ids.view(-1)[places_R])
    steps[lengths_S.cumsum(0)[:-1] - 1] = 1  # from one sequence to the next
    odd = (steps != 1).nonzero()
    if len(odd):
        row, position = divmod(int(places_R[int(odd[0]) + 1]), batch.labels.shape[1])
        document = batch.document_at(row, position)
        raise UserError(
            f"{document.name or f'row {row}'}: position_ids[{position - document.where.start}] does not go on from the one "
            "before it; backend=megatron needs positions that count up by one, or restart at 0 (backend=transformers takes any)"
        )
