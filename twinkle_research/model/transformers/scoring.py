"""From a padded or packed micro-batch to per-token scores: body, output projection at the labels, back to [B, T]."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from twinkle_research.errors import UserError
from twinkle_research.loss.base import Loss, TokenScores
from twinkle_research.model.dropout import DropoutState
from twinkle_research.model.head import LogitTransform, score_labels
from twinkle_research.model.microbatch import MicroBatch
from twinkle_research.model.transformers.attention import document_lengths, packed_attention
from twinkle_research.model.transformers.lora import head_terms
from twinkle_research.model.value_head import ValueHead
from twinkle_research.processor.base import Batch


@dataclass
class RowBatch(MicroBatch):
    """``lengths``: of the documents, where the batch is packed."""

    lengths: tuple[int, ...] | None


@dataclass
class Scorer:
    """Runs one model. ``module`` is the transformers model, with an adapter injected or not."""

    module: nn.Module
    body: nn.Module
    transform: LogitTransform
    device: torch.device
    dtype: torch.dtype  # of the scores
    logits_chunk: int
    dropout: DropoutState
    vocabulary: int

    def prepare(self, batch: Batch, step: int, numbers: Sequence[int]) -> RowBatch:
        """``numbers``: sample indices for the features that bring none."""
        lengths = document_lengths(batch) if batch.packed else None
        return RowBatch.of(
            batch, step, numbers, vocabulary=self.vocabulary, device=self.device, dtype=self.dtype, lengths=lengths
        )

    @contextmanager
    def active(self, micro: RowBatch) -> Iterator[None]:
        """Around each pass through the model, forward or backward (gradient checkpointing runs the forward pass again)."""
        self.dropout.key = micro.dropout_key
        try:
            with packed_attention(self.body.config, micro.lengths):
                yield
        finally:
            self.dropout.key = None

    def scores(self, micro: RowBatch, loss: Loss, normalizer: float | None, value_head: ValueHead | None = None) -> TokenScores:
        """``normalizer``: what the loss will be divided by, None where that is not known yet. Inside ``active``."""
        hidden_BTD = self.body(**self._body_inputs(micro.batch))[0]
        if not micro.num_tokens:  # run for the other ranks' sake
            nothing_BT = micro.inputs.mask + (hidden_BTD * 0).sum().to(self.dtype)
            return TokenScores(nothing_BT, nothing_BT, nothing_BT, nothing_BT, nothing_BT if value_head else None)
        if "values" in loss.needs and value_head is None:
            raise UserError(f"{type(loss).__name__} needs values: call add_value_head first")
        positions_N = micro.positions_N.to(self.device)
        labels_N = micro.batch.labels.view(-1)[micro.positions_N].to(self.device)
        values_N = None
        if value_head is not None:
            values_N = value_head(hidden_BTD.reshape(-1, hidden_BTD.shape[-1]).index_select(0, positions_N)).to(self.dtype)
        hidden_BTD, weight_VD, bias_V = head_terms(self.module.get_output_embeddings(), hidden_BTD)
        hidden_ND = hidden_BTD.reshape(-1, hidden_BTD.shape[-1]).index_select(0, positions_N)
        known_N = None
        if weight_VD.requires_grad and torch.is_grad_enabled() and normalizer is not None:
            known_BT = loss.logprob_gradient(micro.inputs, normalizer)
            known_N = None if known_BT is None else known_BT.view(-1)[positions_N]
        found = score_labels(
            hidden_ND, weight_VD, labels_N, bias_V=bias_V, transform=self.transform, needs=loss.needs - {"values"},
            chunk=self.logits_chunk,
            logprob_gradient_N=known_N, sampled_from=micro.sampled_from(micro.positions_N, self.device, self.dtype),
        )  # fmt: skip

        def spread(values_N: Tensor | None) -> Tensor | None:
            return None if values_N is None else micro.spread(values_N, positions_N)

        head_N = (found.logprobs, found.entropy, found.logsumexp, found.mean_logprobs)
        return TokenScores(*map(spread, head_N), values=spread(values_N))

    def _body_inputs(self, batch: Batch) -> dict[str, object]:
        """Padding on the right needs no mask: a causal model's tokens never look at what comes after them.

        Position ids that only count up are left to the model. Others (packed documents) also make transformers' own
        attention keep the documents apart, which it does only without a mask; ours needs none.
        """
        inputs: dict[str, object] = {"input_ids": batch.input_ids.to(self.device), "use_cache": False}
        tokens = batch.attention_mask.bool()
        if not tokens[:, 0].all() and not batch.packed:
            inputs["attention_mask"] = batch.attention_mask.to(self.device)
        counting = torch.arange(tokens.shape[1]).expand_as(batch.position_ids)
        if not torch.equal(batch.position_ids.where(tokens, counting), counting):
            inputs["position_ids"] = batch.position_ids.to(self.device)
        return inputs
