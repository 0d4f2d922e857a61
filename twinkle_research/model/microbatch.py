"""A collated micro-batch as every backend scores it: its trained positions, what its loss looks at, and what keys its dropout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from twinkle_research.data_format import IGNORE_INDEX
from twinkle_research.errors import DataError, UserError
from twinkle_research.loss.base import LossInputs
from twinkle_research.model.dropout import DropoutKey
from twinkle_research.model.head import SampledFrom
from twinkle_research.processor.base import LOSS_INPUTS, Batch


@dataclass
class MicroBatch:
    """A micro-batch on its way through a model. N counts its trained positions."""

    batch: Batch  # on the CPU
    positions_N: Tensor  # CPU int64, index into the flattened [B * T], ascending
    inputs: LossInputs  # on the device
    dropout_key: DropoutKey

    @classmethod
    def of(
        cls, batch: Batch, step: int, numbers: Sequence[int], *, vocabulary: int, device: torch.device, dtype: torch.dtype,
        **own: Any,
    ) -> Self:  # fmt: skip
        """``numbers``: sample indices for the features that bring none. ``own``: what a backend adds. Raises DataError for a
        token outside the vocabulary, UserError where the features' dropout has different keys."""
        check_ids(batch, vocabulary)
        trained = batch.labels != IGNORE_INDEX
        steps = {step if d.dropout_step is None else d.dropout_step for d in batch.documents}
        if len(steps) > 1:
            raise UserError(f"rows of different rollouts ({sorted(steps)}) in one micro-batch: their dropout has different keys")
        documents = tuple(
            (d.row, d.where, number if d.sample_index is None else d.sample_index)
            for d, number in zip(batch.documents, numbers, strict=True)
        )
        return cls(
            batch,
            trained.view(-1).nonzero().squeeze(-1),
            _loss_inputs(batch, trained, device, dtype),
            DropoutKey(steps.pop(), tuple(trained.shape), documents),
            **own,
        )

    @property
    def num_tokens(self) -> int:
        return len(self.positions_N)

    def sampled_from(self, places_N: Tensor, device: torch.device, dtype: torch.dtype) -> SampledFrom:
        """``places_N``: CPU, the places in [B * T], ascending, that are scored: the trained ones or some of them."""
        batch = self.batch
        temperature_N = None
        if batch.temperature is not None:
            temperature_N = batch.temperature.view(-1)[places_N].to(device, dtype)
        if batch.kept is None:
            return SampledFrom(temperature_N)
        places_K, ids_K = batch.kept
        if len(places_N) < self.num_tokens:
            here_K = torch.isin(places_K, places_N)
            places_K, ids_K = places_K[here_K], ids_K[here_K]
        return SampledFrom(temperature_N, torch.searchsorted(places_N, places_K).to(device), ids_K.to(device))

    def spread(self, values_N: Tensor, places_N: Tensor) -> Tensor:
        """[B, T], 0 elsewhere."""
        flat = torch.zeros(self.batch.labels.numel(), dtype=values_N.dtype, device=values_N.device)
        return flat.index_copy(0, places_N, values_N).view(self.batch.labels.shape)

    def by_document(self, values_BT: Tensor | None) -> list[list[float]]:
        """Per feature aligned with its labels, 0.0 where not trained."""
        documents = self.batch.documents
        if values_BT is None:
            return [[0.0] * d.length for d in documents]
        values = values_BT.detach().cpu()
        return [values[d.row, d.where].tolist() for d in documents]


def check_ids(batch: Batch, vocabulary: int) -> None:
    for name, ids in (("input_ids", batch.input_ids), ("labels", batch.labels)):
        wrong = (ids >= vocabulary) | ((ids < 0) & (ids != IGNORE_INDEX if name == "labels" else True))
        if wrong.any():
            row, position = wrong.nonzero()[0].tolist()
            document = batch.document_at(row, position)
            where = f"{document.name or f'row {row}'}: {name}[{position - document.where.start}]"
            raise DataError(
                f"{where} is {int(ids[row, position])}, but the model knows the tokens 0 to {vocabulary - 1}; "
                "is this the model's own tokenizer?"
            )


def _loss_inputs(batch: Batch, trained: Tensor, device: torch.device, dtype: torch.dtype) -> LossInputs:
    def move(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(device, dtype)

    given = {name: move(getattr(batch, name)) for name in LOSS_INPUTS.values()}
    return LossInputs(move(trained), batch.sequence_ids.to(device), batch.num_sequences, **given)
