"""From features (lists) to micro-batches of tensors.

Padding follows row lengths only. Token ids are never compared with the pad id, so an end-of-text token that is
also the pad token stays trained (and a row that lacks one gets none).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from twinkle_research.data_format import IGNORE_INDEX, InputFeature
from twinkle_research.errors import ConfigError, DataError, nearest

# Public (the seed's) name of a per-token loss input -> field of Batch. The one place where the names are translated.
LOSS_INPUTS = {"advantages": "advantages", "old_logps": "old_logprobs", "ref_logps": "ref_logprobs"}


@dataclass
class Batch:
    """One padded micro-batch. B rows, T positions; rows are in the order of the features.

    ``sequence_ids[b, t]`` numbers the document that a position belongs to, over the whole batch: one document a
    row, or several where rows are packed. Padding carries the last document of its row (always a valid index).
    ``rows`` and ``sample_indices`` are per row and come from the features (None where a feature has none).
    """

    input_ids: Tensor  # [B, T] int64, 0 on padding
    labels: Tensor  # [B, T] int64, pre-shifted, IGNORE_INDEX on padding
    attention_mask: Tensor  # [B, T] int64, 1 on tokens, 0 on padding
    position_ids: Tensor  # [B, T] int64, 0 on padding
    sequence_ids: Tensor  # [B, T] int64
    num_sequences: int
    lengths: list[int]  # tokens of each row, padding excluded
    sample_indices: list[int | None] = field(default_factory=list)
    rows: list[str | None] = field(default_factory=list)
    advantages: Tensor | None = None  # [B, T] float32, 0 where not trained
    old_logprobs: Tensor | None = None  # [B, T] float32, 0 where not trained
    ref_logprobs: Tensor | None = None  # [B, T] float32, 0 where not trained
    padding_side: str = "right"

    @property
    def packed(self) -> bool:
        """True where a row holds more than one document (attention must then stay inside each)."""
        return self.num_sequences > len(self.lengths)

    def row_slice(self, row: int) -> slice:
        """Positions of ``row`` that hold tokens."""
        width, length = self.input_ids.shape[1], self.lengths[row]
        return slice(width - length, width) if self.padding_side == "left" else slice(0, length)


class InputProcessor:
    """Cuts a rank's share of a step into micro-batches and pads each.

    Give at most one of ``micro_batch_size`` (rows) and ``micro_batch_tokens`` (rows x longest row, padding
    included); with neither, one row at a time. A row longer than ``micro_batch_tokens`` is a micro-batch of its own.
    Neither setting changes the update, only memory and speed.
    """

    def __init__(self, padding_side: str = "right", micro_batch_size: int | None = None, micro_batch_tokens: int | None = None):
        if padding_side not in ("right", "left"):
            raise ConfigError(f"padding_side={padding_side!r}: {nearest(padding_side, ('right', 'left'))}")
        if micro_batch_size is not None and micro_batch_tokens is not None:
            raise ConfigError("micro_batch_size and micro_batch_tokens exclude each other: set one of them to null")
        for name, value in (("micro_batch_size", micro_batch_size), ("micro_batch_tokens", micro_batch_tokens)):
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be >= 1, got {value}")
        self.padding_side = padding_side
        self.micro_batch_size = micro_batch_size
        self.micro_batch_tokens = micro_batch_tokens

    def split(self, features: Sequence[InputFeature]) -> list[list[InputFeature]]:
        """Contiguous micro-batches in the order of ``features``, so per-row loss inputs can be cut the same way."""
        return [[features[i] for i in part] for part in self.split_indices([len(f["input_ids"]) for f in features])]

    def split_indices(self, lengths: Sequence[int]) -> list[range]:
        """The same cut as ranges of row numbers, from the rows' lengths alone."""
        if self.micro_batch_tokens is None:
            size = self.micro_batch_size or 1
            return [range(i, min(i + size, len(lengths))) for i in range(0, len(lengths), size)]
        parts: list[range] = []
        start, longest = 0, 0
        for i, length in enumerate(lengths):
            if i > start and max(longest, length) * (i + 1 - start) > self.micro_batch_tokens:
                parts.append(range(start, i))
                start, longest = i, 0
            longest = max(longest, length)
        if lengths:
            parts.append(range(start, len(lengths)))
        return parts

    def collate(self, features: Sequence[InputFeature], device: torch.device | str = "cpu", **loss_inputs: Any) -> Batch:
        """Pads ``features`` to their longest row.

        ``loss_inputs``: ``advantages``, ``old_logps``, ``ref_logps``, each with one entry a row: a scalar (spread
        over the trained positions), a list as long as the row's trained positions (a response), or a list as long
        as the row. Values at positions that are not trained are set to 0.
        """
        if not features:
            raise ValueError("collate needs at least one feature")
        lengths = [len(f["input_ids"]) for f in features]
        width = max(lengths)
        shape = (len(features), width)
        batch = Batch(
            input_ids=torch.zeros(shape, dtype=torch.long),
            labels=torch.full(shape, IGNORE_INDEX, dtype=torch.long),
            attention_mask=torch.zeros(shape, dtype=torch.long),
            position_ids=torch.zeros(shape, dtype=torch.long),
            sequence_ids=torch.zeros(shape, dtype=torch.long),
            num_sequences=0,
            lengths=lengths,
            sample_indices=[f.get("sample_index") for f in features],
            rows=[f.get("row") for f in features],
            padding_side=self.padding_side,
        )
        for i, feature in enumerate(features):
            self._fill_row(batch, i, feature)
        for name, values in loss_inputs.items():
            if name not in LOSS_INPUTS:
                raise TypeError(f"unknown loss input {name!r}: {nearest(name, LOSS_INPUTS)}")
            if values is not None:
                setattr(batch, LOSS_INPUTS[name], _pad_loss_input(name, values, batch))
        for name in ("input_ids", "labels", "attention_mask", "position_ids", "sequence_ids", *LOSS_INPUTS.values()):
            tensor = getattr(batch, name)
            if tensor is not None:
                setattr(batch, name, tensor.to(device))
        return batch

    @staticmethod
    def _fill_row(batch: Batch, i: int, feature: InputFeature) -> None:
        length, where = batch.lengths[i], batch.row_slice(i)
        if length == 0:
            raise DataError(f"{_row_name(batch, i)}: the row has no tokens")
        labels = feature.get("labels")
        if labels is None:
            labels = [IGNORE_INDEX] * length
        positions = feature.get("position_ids")
        if positions is None:
            positions = range(length)
        for name, values in (("labels", labels), ("position_ids", positions)):
            if len(values) != length:
                raise DataError(f"{_row_name(batch, i)}: {name} has {len(values)} entries, input_ids {length}")
        for name, values in (("input_ids", feature["input_ids"]), ("labels", labels)):
            if (
                isinstance(values, list)
                and (wrong := next((k for k, v in enumerate(values) if type(v) is not int), None)) is not None
            ):
                raise DataError(f"{_row_name(batch, i)}: {name}[{wrong}] is {values[wrong]!r}, expected a whole number")
        position_ids = torch.as_tensor(positions, dtype=torch.long)
        batch.input_ids[i, where] = torch.as_tensor(feature["input_ids"], dtype=torch.long)
        batch.labels[i, where] = torch.as_tensor(labels, dtype=torch.long)
        batch.attention_mask[i, where] = 1
        batch.position_ids[i, where] = position_ids
        # A document starts where positions restart; the first position of a row always starts one.
        starts = position_ids == 0
        starts[0] = True
        documents = starts.cumsum(0) - 1 + batch.num_sequences
        batch.sequence_ids[i] = documents[-1]
        batch.sequence_ids[i, where] = documents
        batch.num_sequences = int(documents[-1]) + 1


def pack(features: Sequence[InputFeature]) -> InputFeature:
    """Concatenates documents into one row: positions restart, and no document's last token predicts the next one's first."""
    packed: InputFeature = {"input_ids": [], "labels": [], "attention_mask": [], "position_ids": []}
    for feature in features:
        length = len(feature["input_ids"])
        packed["input_ids"] += list(feature["input_ids"])
        # Pre-shifted labels of one document never name a token of another, so they are joined as they are.
        packed["labels"] += list(feature["labels"])
        packed["attention_mask"] += [1] * length
        packed["position_ids"] += list(range(length))
    packed["length"] = len(packed["input_ids"])
    packed["row"] = " + ".join(f.get("row", "?") for f in features)
    return packed


def _row_name(batch: Batch, i: int) -> str:
    return batch.rows[i] or f"row {i}"


def _pad_loss_input(name: str, values: Any, batch: Batch) -> Tensor:
    """One entry a row -> [B, T] float32, aligned with labels, 0 where not trained."""
    rows = len(batch.lengths)
    if len(values) != rows:
        raise ValueError(f"{name} has {len(values)} entries for {rows} rows")
    trained = batch.labels != IGNORE_INDEX
    out = torch.zeros(batch.labels.shape, dtype=torch.float32)
    for i in range(rows):
        value = torch.as_tensor(values[i], dtype=torch.float32)
        mask = trained[i]
        count, length, where = int(mask.sum()), batch.lengths[i], batch.row_slice(i)
        if value.ndim == 0 or (value.ndim == 1 and len(value) == count):
            out[i, mask] = value
        elif value.ndim == 1 and len(value) == length:
            out[i, where] = value * mask[where]
        else:
            raise ValueError(
                f"{name} of {_row_name(batch, i)} has shape {tuple(value.shape)}; expected a scalar, "
                f"{count} values (trained positions) or {length} values (the whole row)"
            )
    return out
