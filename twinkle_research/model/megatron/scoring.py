"""From the hidden states of the last pipeline stage to per-token scores of the whole micro-batch, whatever part is here."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor

from twinkle_research.loss.base import Loss, TokenScores
from twinkle_research.model.head import score_labels
from twinkle_research.model.megatron.batch import LocalBatch
from twinkle_research.model.vocabulary import WHOLE, ShardedVocabulary, Vocabulary

if TYPE_CHECKING:
    from twinkle_research.model.megatron.build import PolicyModel
    from twinkle_research.model.megatron.mesh import Mesh
    from twinkle_research.model.value_head import ValueHead


class Scorer:
    """``chunk``: the last one of the model. ``vocabulary_size``: without padding."""

    def __init__(self, chunk: PolicyModel, mesh: Mesh, vocabulary_size: int, dtype: torch.dtype, logits_chunk: int) -> None:
        self.chunk = chunk
        self.mesh = mesh
        self.device = mesh.runtime.device
        self.dtype = dtype  # of the scores
        self.logits_chunk = logits_chunk
        padded = len(chunk.output_weight)
        start = mesh.tp.rank * padded
        self.rows = max(min(padded, vocabulary_size - start), 0)  # of the projection that are no padding
        self.vocabulary: Vocabulary = WHOLE
        if mesh.tp.size > 1:
            self.vocabulary = ShardedVocabulary(start, vocabulary_size, mesh.tp.group)

    def scores(
        self, micro: LocalBatch, hidden_T1D: Tensor, loss: Loss, normalizer: float | None, value_head: ValueHead | None
    ) -> TokenScores:
        """[B, T] each. The gradient of the hidden states is complete. ``normalizer``: what the loss will be divided by, None
        where that is not known yet."""
        rows_n, places_n = micro.rows_n.to(self.device), micro.places_n.to(self.device)
        hidden_ND = self._hidden(hidden_T1D.squeeze(1), rows_n)
        weight_VD = self.chunk.output_weight
        if self.rows < len(weight_VD):
            weight_VD = weight_VD[: self.rows]
        known_N = None
        if weight_VD.requires_grad and torch.is_grad_enabled() and normalizer is not None:
            known_BT = loss.logprob_gradient(micro.inputs, normalizer)
            known_N = None if known_BT is None else known_BT.view(-1)[places_n]
        found = score_labels(
            hidden_ND, weight_VD, micro.batch.labels.view(-1)[micro.places_n].to(self.device), needs=loss.needs - {"values"},
            transform=self.chunk.logits, chunk=self.logits_chunk, logprob_gradient_N=known_N, vocabulary=self.vocabulary,
            sampled_from=micro.sampled_from(micro.places_n, self.device, self.dtype),
        )  # fmt: skip
        names = ("logprobs", "entropy", "logsumexp", "mean_logprobs")
        values = {name: getattr(found, name) for name in names if getattr(found, name) is not None}
        if value_head is not None:
            # The parts of the hidden states' gradient are summed over these ranks. This one is not in parts, but whole on each.
            same_ND = hidden_ND if self.mesh.tp.rank == 0 else hidden_ND.detach()
            values["values"] = value_head(same_ND).to(self.dtype)
        if self.mesh.cp.size == 1:
            return TokenScores(**{name: micro.spread(x_N, places_n) for name, x_N in values.items()})
        # Each rank has its own positions. All of them then compute one loss, so that of its gradient each takes its own part.
        parts = torch.stack([micro.spread(x_N, places_n) for x_N in values.values()])
        return TokenScores(**dict(zip(values, reduce_from_tensor_model_parallel_region(parts, self.mesh.cp.group), strict=True)))

    def _hidden(self, hidden_TD: Tensor, rows_n: Tensor) -> Tensor:
        """Those of the trained positions here, equal on all tensor-parallel ranks; their gradient is summed over them."""
        if self.mesh.sequence_parallel:
            return gather_from_sequence_parallel_region(hidden_TD).index_select(0, rows_n)
        hidden_ND = hidden_TD.index_select(0, rows_n)
        return copy_to_tensor_model_parallel_region(hidden_ND) if self.mesh.tp.size > 1 else hidden_ND
