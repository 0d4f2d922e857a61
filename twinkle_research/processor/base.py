"""From features (lists) to micro-batches of tensors.

Padding follows row lengths only. Token ids are never compared with the pad id, so an end-of-text token that is
also the pad token stays trained (and a row that lacks one gets none).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from twinkle_research.data_format import IGNORE_INDEX, InputFeature
from twinkle_research.errors import ConfigError, DataError, nearest
from twinkle_research.processor.features import check_shifted

# Public (the seed's) name of a per-token loss input -> field of Batch. The one place where the names are translated.
LOSS_INPUTS = {
    "advantages": "advantages", "old_logps": "old_logprobs", "ref_logps": "ref_logprobs", "sampler_logps": "sampler_logprobs",
    "old_values": "old_values", "returns": "returns", "baselines": "baselines",
}  # fmt: skip


@dataclass(frozen=True)
class Document:
    """One feature in a batch."""

    row: int
    where: slice  # its positions in that row
    sample_index: int | None  # of the feature, None where it has none
    name: str | None  # where the feature came from
    dropout_step: int | None = None  # of the feature, None where it has none

    @property
    def length(self) -> int:
        return self.where.stop - self.where.start


@dataclass
class Batch:
    """One micro-batch, padded (a document a row) or packed (one row of documents, without padding). B rows, T positions.

    ``documents`` are the features in their order. ``sequence_ids[b, t]`` numbers the sequence that a position belongs to,
    over the whole batch: a feature is one sequence, or several where its positions restart. Padding carries the last
    sequence of its row (always a valid index).
    """

    input_ids: Tensor  # [B, T] int64, 0 on padding
    labels: Tensor  # [B, T] int64, pre-shifted, IGNORE_INDEX on padding
    attention_mask: Tensor  # [B, T] int64, 1 on tokens, 0 on padding
    position_ids: Tensor  # [B, T] int64, 0 on padding
    sequence_ids: Tensor  # [B, T] int64
    num_sequences: int
    documents: list[Document]
    advantages: Tensor | None = None  # [B, T] float32, 0 where not trained
    old_logprobs: Tensor | None = None  # [B, T] float32, 0 where not trained
    ref_logprobs: Tensor | None = None  # [B, T] float32, 0 where not trained
    sampler_logprobs: Tensor | None = None  # [B, T] float32, 0 where not trained
    old_values: Tensor | None = None  # [B, T] float32, 0 where not trained
    returns: Tensor | None = None  # [B, T] float32, 0 where not trained
    baselines: Tensor | None = None  # [B, T] float32, 0 where not trained
    temperature: Tensor | None = None  # [B, T] float32; None: 1 everywhere
    # Kept sets as pairs: places in the flattened [B * T], ascending, and token ids. Places not named keep all tokens.
    kept: tuple[Tensor, Tensor] | None = None  # int64 [K], int64 [K]

    @property
    def packed(self) -> bool:
        """True where a row holds more than one sequence (attention must then stay inside each)."""
        return self.num_sequences > len(self.input_ids)

    def document_at(self, row: int, position: int) -> Document:
        return next(d for d in self.documents if d.row == row and d.where.start <= position < d.where.stop)


class InputProcessor:
    """Cuts a rank's share of a step into micro-batches, and pads or packs each.

    Give at most one of ``micro_batch_size`` (rows, or pairs where rows come in pairs) and ``micro_batch_tokens`` (rows x
    longest row, padding included; with ``packing`` the length of the one row); with neither, one document at a time. A
    document longer than ``micro_batch_tokens`` is a micro-batch of its own. No setting changes the update, only memory and
    speed.
    """

    def __init__(
        self,
        padding_side: str = "right",
        micro_batch_size: int | None = None,
        micro_batch_tokens: int | None = None,
        packing: bool = False,
    ):
        if padding_side not in ("right", "left"):
            raise ConfigError(f"padding_side={padding_side!r}: {nearest(padding_side, ('right', 'left'))}")
        if micro_batch_size is not None and micro_batch_tokens is not None:
            raise ConfigError("micro_batch_size and micro_batch_tokens exclude each other: set one of them to null")
        if packing and micro_batch_size is not None:
            raise ConfigError("micro_batch_size counts padded rows; packing needs micro_batch_tokens instead")
        for name, value in (("micro_batch_size", micro_batch_size), ("micro_batch_tokens", micro_batch_tokens)):
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be >= 1, got {value}")
        self.padding_side = padding_side
        self.micro_batch_size = micro_batch_size
        self.micro_batch_tokens = micro_batch_tokens
        self.packing = packing

    def split(self, features: Sequence[InputFeature], together: int = 1) -> list[list[InputFeature]]:
        """The features of each micro-batch."""
        lengths = [len(f["input_ids"]) for f in features]
        return [[features[i] for i in part] for part in self.split_indices(lengths, together)]

    def split_indices(self, lengths: Sequence[int], together: int = 1) -> list[list[int]]:
        """The same cut as numbers of the rows, from their lengths alone, so that per-row loss inputs can be cut alike.

        Under a token budget the longest rows come first: micro-batches are of like rows (padded) or full (packed).
        ``together``: that many rows in turn (a pair) stay in one micro-batch and in order; they count as one for
        ``micro_batch_size``.
        """
        groups = [lengths[i : i + together] for i in range(0, len(lengths), together)]
        parts = self._split_groups(groups)
        return [[g * together + k for g in part for k in range(len(groups[g]))] for part in parts]

    def _split_groups(self, groups: Sequence[Sequence[int]]) -> list[list[int]]:
        """``groups``: the lengths of rows that stay together."""
        order = list(range(len(groups)))
        if self.micro_batch_tokens is None:
            size = self.micro_batch_size or 1
            return [order[i : i + size] for i in range(0, len(order), size)]
        sizes = [sum(group) if self.packing else max(group) for group in groups]
        order.sort(key=lambda g: -sizes[g])
        return self._first_fit(order, sizes) if self.packing else self._alike(order, sizes, len(groups[0]) if groups else 1)

    def _alike(self, order: list[int], longest: Sequence[int], rows: int) -> list[list[int]]:
        """``rows``: of each group."""
        parts: list[list[int]] = []
        for i in order:
            if not parts or longest[parts[-1][0]] * rows * (len(parts[-1]) + 1) > self.micro_batch_tokens:
                parts.append([])
            parts[-1].append(i)
        return parts

    def _first_fit(self, order: list[int], lengths: Sequence[int]) -> list[list[int]]:
        """First-fit decreasing: at most 11/9 of the fewest possible rows, and 6/9 more (Dosa 2007)."""
        parts: list[list[int]] = []
        room: list[int] = []
        for i in order:
            k = next((k for k, free in enumerate(room) if free >= lengths[i]), len(parts))
            if k == len(parts):
                parts.append([])
                room.append(self.micro_batch_tokens)
            parts[k].append(i)
            room[k] -= lengths[i]
        return parts

    def collate(self, features: Sequence[InputFeature], device: torch.device | str = "cpu", **loss_inputs: Any) -> Batch:
        """Pads ``features`` to their longest row, or packs them into one.

        ``loss_inputs``: by the names of LOSS_INPUTS, each with one entry a feature: a scalar (spread
        over the trained positions), a list as long as the feature's trained positions (a response), or a list as long
        as the feature. Values at positions that are not trained are set to 0.
        """
        if not features:
            raise ValueError("collate needs at least one feature")
        documents, shape = self._place(features)
        batch = Batch(
            input_ids=torch.zeros(shape, dtype=torch.long),
            labels=torch.full(shape, IGNORE_INDEX, dtype=torch.long),
            attention_mask=torch.zeros(shape, dtype=torch.long),
            position_ids=torch.zeros(shape, dtype=torch.long),
            sequence_ids=torch.zeros(shape, dtype=torch.long),
            num_sequences=0,
            documents=documents,
        )
        for i, feature in enumerate(features):
            self._fill(batch, i, feature)
        batch.temperature, batch.kept = _temperature(batch, features), _kept(batch, features)
        for name, values in loss_inputs.items():
            if name not in LOSS_INPUTS:
                raise ConfigError(f"unknown loss input {name!r}: {nearest(name, LOSS_INPUTS)}")
            if values is not None:
                setattr(batch, LOSS_INPUTS[name], _pad_loss_input(name, values, batch))
        for name in ("input_ids", "labels", "attention_mask", "position_ids", "sequence_ids", *LOSS_INPUTS.values()):
            tensor = getattr(batch, name)
            if tensor is not None:
                setattr(batch, name, tensor.to(device))
        return batch

    def _place(self, features: Sequence[InputFeature]) -> tuple[list[Document], tuple[int, int]]:
        """Where each feature goes, and the shape of it all."""
        lengths = [len(f["input_ids"]) for f in features]
        width = sum(lengths) if self.packing else max(lengths)
        documents, end = [], 0
        for i, (feature, length) in enumerate(zip(features, lengths, strict=True)):
            start = end if self.packing else width - length if self.padding_side == "left" else 0
            end = start + length
            row = 0 if self.packing else i
            where = slice(start, end)
            documents.append(Document(row, where, feature.get("sample_index"), feature.get("row"), feature.get("dropout_step")))
        return documents, (1 if self.packing else len(features), width)

    def _fill(self, batch: Batch, i: int, feature: InputFeature) -> None:
        document = batch.documents[i]
        row, where, length = document.row, document.where, document.length
        if length == 0:
            raise DataError(f"{_name(batch, i)}: the row has no tokens")
        labels = feature.get("labels")
        if labels is None:
            labels = [IGNORE_INDEX] * length
        positions = feature.get("position_ids")
        if positions is None:
            positions = range(length)
        for name, values in (("labels", labels), ("position_ids", positions)):
            if len(values) != length:
                raise DataError(f"{_name(batch, i)}: {name} has {len(values)} entries, input_ids {length}")
        for name, values in (("input_ids", feature["input_ids"]), ("labels", labels)):
            if (
                isinstance(values, list)
                and (wrong := next((k for k, v in enumerate(values) if type(v) is not int), None)) is not None
            ):
                raise DataError(f"{_name(batch, i)}: {name}[{wrong}] is {values[wrong]!r}, expected a whole number")
        position_ids = torch.as_tensor(positions, dtype=torch.long)
        if where.start > 0 and self.packing and position_ids[0] != 0:
            raise DataError(
                f"{_name(batch, i)}: position_ids begins with {int(position_ids[0])}, so in a packed row it would seem to go "
                "on with the document before it; begin with 0, or set data.packing=false"
            )
        batch.input_ids[row, where] = torch.as_tensor(feature["input_ids"], dtype=torch.long)
        batch.labels[row, where] = torch.as_tensor(labels, dtype=torch.long)
        check_shifted(batch.input_ids[row, where], batch.labels[row, where], _name(batch, i))
        batch.attention_mask[row, where] = 1
        batch.position_ids[row, where] = position_ids
        # A sequence starts where positions restart; the first position of a feature always starts one.
        starts = position_ids == 0
        starts[0] = True
        sequences = starts.cumsum(0) - 1 + batch.num_sequences
        if len(batch.input_ids) > 1:
            batch.sequence_ids[row] = sequences[-1]  # also the padding
        batch.sequence_ids[row, where] = sequences
        batch.num_sequences = int(sequences[-1]) + 1


def _temperature(batch: Batch, features: Sequence[InputFeature]) -> Tensor | None:
    values = [feature.get("temperature", 1.0) for feature in features]
    if all(value == 1.0 for value in values):
        return None
    out = torch.ones(batch.labels.shape)
    for i, (document, value) in enumerate(zip(batch.documents, values, strict=True)):
        if not value > 0:
            raise DataError(f"{_name(batch, i)}: temperature must be > 0, got {value}: greedy tokens were not drawn")
        out[document.row, document.where] = value
    return out


def _kept(batch: Batch, features: Sequence[InputFeature]) -> tuple[Tensor, Tensor] | None:
    """Raises DataError where a label is not in its own kept set."""
    places, ids = [], []
    for i, (document, feature) in enumerate(zip(batch.documents, features, strict=True)):
        sets = feature.get("kept_ids")
        if sets is None:
            continue
        labels = batch.labels[document.row, document.where]
        trained = (labels != IGNORE_INDEX).nonzero().squeeze(-1)
        if len(sets) != len(trained):
            raise DataError(f"{_name(batch, i)}: kept_ids has {len(sets)} sets for {len(trained)} trained positions")
        sizes = torch.tensor([len(kept) for kept in sets], dtype=torch.long)
        flat = torch.tensor([token for kept in sets for token in kept], dtype=torch.long)
        found = torch.zeros(len(trained), dtype=torch.long).index_add(
            0, torch.arange(len(trained)).repeat_interleave(sizes), (flat == labels[trained].repeat_interleave(sizes)).long()
        )
        if not found.all():
            k = int((found == 0).nonzero()[0])
            raise DataError(f"{_name(batch, i)}: label {int(labels[trained[k]])} is not in its own kept set (kept_ids[{k}])")
        start = document.row * batch.labels.shape[1] + document.where.start
        places.append((trained + start).repeat_interleave(sizes))
        ids.append(flat)
    if not places:
        return None
    return torch.cat(places), torch.cat(ids)


def _name(batch: Batch, i: int) -> str:
    return batch.documents[i].name or f"row {i}"


def _pad_loss_input(name: str, values: Any, batch: Batch) -> Tensor:
    """One entry a document -> [B, T] float32, aligned with labels, 0 where not trained."""
    if len(values) != len(batch.documents):
        raise DataError(f"{name} has {len(values)} entries for {len(batch.documents)} rows")
    trained = batch.labels != IGNORE_INDEX
    out = torch.zeros(batch.labels.shape, dtype=torch.float32)
    for i, document in enumerate(batch.documents):
        value = torch.as_tensor(values[i], dtype=torch.float32)
        part, mask = out[document.row, document.where], trained[document.row, document.where]
        count = int(mask.sum())
        if value.ndim == 0 or (value.ndim == 1 and len(value) == count):
            part[mask] = value
        elif value.ndim == 1 and len(value) == document.length:
            part[mask] = value[mask]  # what stands at the others may be anything
        else:
            raise DataError(
                f"{name} of {_name(batch, i)} has shape {tuple(value.shape)}; expected a scalar, "
                f"{count} values (trained positions) or {document.length} values (the whole row)"
            )
    return out
