"""From a padded or packed micro-batch to per-token scores: body, output projection at the labels, back to [B, T]."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from twinkle_research.data_format import IGNORE_INDEX
from twinkle_research.errors import DataError, UserError
from twinkle_research.loss.base import Loss, LossInputs, TokenScores
from twinkle_research.model.dropout import DropoutKey, DropoutState
from twinkle_research.model.head import LogitTransform, SampledFrom, score_labels
from twinkle_research.model.transformers.attention import document_lengths, packed_attention
from twinkle_research.model.transformers.lora import head_terms
from twinkle_research.model.transformers.value_head import ValueHead
from twinkle_research.processor.base import LOSS_INPUTS, Batch


@dataclass
class MicroBatch:
    """A collated micro-batch on its way through the model. N counts its trained positions."""

    batch: Batch  # on the CPU
    positions_N: Tensor  # CPU int64, index into the flattened [B * T]
    inputs: LossInputs  # on the device
    dropout_key: DropoutKey
    lengths: tuple[int, ...] | None  # of the documents, where the batch is packed

    @property
    def num_tokens(self) -> int:
        return len(self.positions_N)


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

    def prepare(self, batch: Batch, step: int, numbers: Sequence[int]) -> MicroBatch:
        """``numbers``: sample indices for the features that bring none."""
        self._check_ids(batch)
        trained = batch.labels != IGNORE_INDEX
        steps = {step if d.dropout_step is None else d.dropout_step for d in batch.documents}
        if len(steps) > 1:
            raise UserError(f"rows of different rollouts ({sorted(steps)}) in one micro-batch: their dropout has different keys")
        documents = tuple(
            (d.row, d.where, number if d.sample_index is None else d.sample_index)
            for d, number in zip(batch.documents, numbers, strict=True)
        )
        return MicroBatch(
            batch,
            trained.view(-1).nonzero().squeeze(-1),
            self._loss_inputs(batch, trained),
            DropoutKey(steps.pop(), tuple(trained.shape), documents),
            document_lengths(batch) if batch.packed else None,
        )

    @contextmanager
    def active(self, micro: MicroBatch) -> Iterator[None]:
        """Around each pass through the model, forward or backward (gradient checkpointing runs the forward pass again)."""
        self.dropout.key = micro.dropout_key
        try:
            with packed_attention(self.body.config, micro.lengths):
                yield
        finally:
            self.dropout.key = None

    def _check_ids(self, batch: Batch) -> None:
        for name, ids in (("input_ids", batch.input_ids), ("labels", batch.labels)):
            wrong = (ids >= self.vocabulary) | ((ids < 0) & (ids != IGNORE_INDEX if name == "labels" else True))
            if wrong.any():
                row, position = wrong.nonzero()[0].tolist()
                document = batch.document_at(row, position)
                where = f"{document.name or f'row {row}'}: {name}[{position - document.where.start}]"
                raise DataError(
                    f"{where} is {int(ids[row, position])}, but the model knows the tokens 0 to {self.vocabulary - 1}; "
                    "is this the model's own tokenizer?"
                )

    def _loss_inputs(self, batch: Batch, trained: Tensor) -> LossInputs:
        def move(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(self.device, self.dtype)

        given = {name: move(getattr(batch, name)) for name in LOSS_INPUTS.values()}
        return LossInputs(move(trained), batch.sequence_ids.to(self.device), batch.num_sequences, **given)

    def _sampled_from(self, micro: MicroBatch, positions_N: Tensor) -> SampledFrom:
        batch = micro.batch
        temperature_N = None
        if batch.temperature is not None:
            temperature_N = batch.temperature.view(-1)[micro.positions_N].to(self.device, self.dtype)
        if batch.kept is None:
            return SampledFrom(temperature_N)
        places_K, ids_K = batch.kept
        return SampledFrom(temperature_N, torch.searchsorted(positions_N, places_K.to(self.device)), ids_K.to(self.device))

    def scores(self, micro: MicroBatch, loss: Loss, normalizer: float | None, value_head: ValueHead | None = None) -> TokenScores:
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
            logprob_gradient_N=known_N, sampled_from=self._sampled_from(micro, positions_N),
        )  # fmt: skip

        def spread(values_N: Tensor | None) -> Tensor | None:
            if values_N is None:
                return None
            flat = torch.zeros(micro.batch.labels.numel(), dtype=values_N.dtype, device=self.device)
            return flat.index_copy(0, positions_N, values_N).view(micro.batch.labels.shape)

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


def by_document(micro: MicroBatch, values_BT: Tensor | None) -> list[list[float]]:
    """Per feature aligned with its labels, 0.0 where not trained."""
    documents = micro.batch.documents
    if values_BT is None:
        return [[0.0] * d.length for d in documents]
    values = values_BT.detach().cpu()
    return [values[d.row, d.where].tolist() for d in documents]
