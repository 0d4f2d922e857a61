"""What every backend does around its passes: cutting rows into micro-batches before, numbers for the caller after."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from twinkle_research.data_format import IGNORE_INDEX, InputFeature
from twinkle_research.errors import ConfigError, DataError, UserError, nearest
from twinkle_research.loss import resolve_loss
from twinkle_research.loss.base import Loss, LossOutput, TokenScores
from twinkle_research.metric import CallRecord
from twinkle_research.metric.base import largest
from twinkle_research.model.base import Result
from twinkle_research.model.microbatch import MicroBatch
from twinkle_research.model.training import TrainingState
from twinkle_research.processor.base import LOSS_INPUTS, Batch, InputProcessor
from twinkle_research.processor.features import as_features

if TYPE_CHECKING:
    from twinkle_research.metric.base import Sums
    from twinkle_research.model.reference import Reference
    from twinkle_research.model.value_head import ValueHead
    from twinkle_research.template.base import Template

log = logging.getLogger(__name__)


@dataclass
class Pass:
    """A micro-batch on its way. ``numbers``: its rows in the call that it belongs to; none where it only keeps step with
    other ranks. ``scores`` and ``output`` are None where nothing is trained."""

    micro: MicroBatch
    features: Sequence[InputFeature]
    numbers: Sequence[int]
    scores: TokenScores | None = None
    output: LossOutput | None = None

    def let_go(self) -> None:
        """Of the graph; values stay."""
        if self.output is not None:
            self.output.loss = self.output.loss.detach()
        if self.scores is not None:
            values = self.scores.values
            self.scores = TokenScores(self.scores.logprobs.detach(), values=None if values is None else values.detach())


@dataclass
class Trained:
    """What is trained, and how: an adapter, or with the name "" all weights. ``training`` is None until it begins."""

    name: str
    training: TrainingState | None = None
    loss: Loss = field(default_factory=lambda: resolve_loss("CrossEntropyLoss"))
    processor: InputProcessor = field(default_factory=InputProcessor)
    template: Template | None = None
    value_head: ValueHead | None = None
    reference: Reference | None = None
    # Between forward and backward; empty on a rank without rows, None before a forward.
    passes: list[Pass] | None = None
    has_loss: bool = False  # of these passes
    first_sample: int = 0  # numbers rows that come without a sample_index


# --- before -----------------------------------------------------------------------------------------------------------


@dataclass
class Cut:
    """One micro-batch of a call: its rows, their numbers in the call and among the samples of the step."""

    batch: Batch  # on the CPU
    features: Sequence[InputFeature]
    numbers: Sequence[int]
    samples: Sequence[int]


def cut(trained: Trained, inputs: Sequence[InputFeature], loss_inputs: dict[str, Any], together: int) -> Iterator[Cut]:
    """The micro-batches of a call, collated. ``together``: as ``Loss.rows_together``."""
    inputs = as_features(inputs)
    _check_loss_inputs(trained.loss, loss_inputs, len(inputs))
    first = trained.first_sample
    if len(inputs) % together:
        raise UserError(f"{type(trained.loss).__name__} takes rows by {together}, but got {len(inputs)} of them")
    for part in trained.processor.split_indices([len(f["input_ids"]) for f in inputs], together):
        features = [inputs[i] for i in part]
        own = {name: None if values is None else [values[i] for i in part] for name, values in loss_inputs.items()}
        batch = trained.processor.collate(features, "cpu", **own)
        if together > 1 and batch.num_sequences != len(features):
            raise UserError(f"{type(trained.loss).__name__} compares whole rows, but position_ids restart inside a row")
        yield Cut(batch, features, part, [first + i for i in part])
    trained.first_sample = first + len(inputs)


def empty(trained: Trained, loss_inputs: dict[str, Any], together: int) -> Cut:
    """A micro-batch that trains nothing, for a rank that only keeps step with others."""
    zeros = {name: None if values is None else [0.0] * together for name, values in loss_inputs.items()}
    nothing = [{"input_ids": [0], "labels": [IGNORE_INDEX]}] * together
    return Cut(trained.processor.collate(nothing, "cpu", **zeros), [], [], [0] * together)


def _check_loss_inputs(loss: Loss, given: dict[str, Any], rows: int) -> None:
    """Raises ConfigError for one that does not exist or has no effect on ``loss``, DataError where it is not one for each row."""
    for name, values in given.items():
        if name not in LOSS_INPUTS:
            raise ConfigError(f"unknown loss input {name!r}; {nearest(name, LOSS_INPUTS)}")
        if values is None:
            continue
        if name not in loss.reads:
            what = f"those that it reads: {', '.join(sorted(loss.reads))}" if loss.reads else "it reads no loss inputs"
            raise ConfigError(f"{name} has no effect on {type(loss).__name__}; {what}")
        if len(values) != rows:
            raise DataError(f"{name} has {len(values)} entries for {rows} rows")


# --- after ------------------------------------------------------------------------------------------------------------


@dataclass
class Summary:
    """What a call came to, in plain numbers. ``logps`` and ``values`` (None: no value head): per row in the caller's order,
    aligned with the labels, 0.0 where not trained."""

    logps: list[list[float]]
    values: list[list[float]] | None
    losses: list[float]  # of the micro-batches that have one
    metrics: Sums
    maxima: dict[str, float]
    bad_rows: list[str]  # those whose own loss is not finite

    def scores(self) -> dict[str, list[list[float]]]:
        return {"logps": self.logps} | ({} if self.values is None else {"values": self.values})


def summarize(trained: Trained, items: Sequence[Pass]) -> Summary:
    """Reads the results off the device, once for the whole call."""
    ran = [item for item in items if item.output is not None]
    losses = torch.stack([item.output.loss.detach() for item in ran]).tolist() if ran else []
    bad = [item for item, value in zip(ran, losses, strict=True) if not math.isfinite(value)]
    return Summary(
        logps=in_order(items, "logprobs"),
        values=in_order(items, "values") if trained.value_head else None,
        losses=losses,
        metrics=_extra_sums([item.output for item in ran]),
        maxima=largest(*[{name: float(value) for name, value in item.output.maxima.items()} for item in ran]),
        bad_rows=[row for item in bad for row in _bad_rows(item)],
    )


def book(
    trained: Trained, items: Sequence[Pass], summary: Summary, divisor: float, normalized: bool, is_training: bool = True
) -> Result:
    """Enters a call into metrics and window, and answers it."""
    training = trained.training
    features = in_callers_order(items)
    loss = sum(summary.losses)
    count = trained.loss.count(features)
    tokens = sum(item.micro.num_tokens for item in items)
    if not tokens and (features or training.runtime.world_size == 1):  # of several ranks some may have no rows
        log.warning("no label of these %d rows is trained (all are %d): the loss is 0", len(features), IGNORE_INDEX)
    training.meters[is_training].accumulate(
        CallRecord(loss * divisor, count, tokens, summary.metrics, summary.maxima, features, summary.logps)
    )
    if is_training:
        training.record(count, summary.bad_rows, not all(map(math.isfinite, summary.losses)))
    return Result({"loss": loss if normalized else loss / max(count, 1), "num_tokens": tokens} | summary.scores())


def in_callers_order(items: Sequence[Pass]) -> list[InputFeature]:
    numbered = [pair for item in items for pair in zip(item.numbers, item.features, strict=True)]
    return [feature for _, feature in sorted(numbered, key=lambda pair: pair[0])]


def in_order(items: Sequence[Pass], name: str) -> list[list[float]]:
    """Values of TokenScores' field ``name`` per row, in the caller's order, aligned with the labels."""
    numbered = [
        pair
        for item in items
        if item.features
        for pair in zip(item.numbers, item.micro.by_document(item.scores and getattr(item.scores, name)), strict=True)
    ]
    return [values for _, values in sorted(numbered, key=lambda pair: pair[0])]


def _extra_sums(outputs: list[LossOutput]) -> Sums:
    names = dict.fromkeys(name for output in outputs for name in output.metrics)
    pairs = {name: [output.metrics[name] for output in outputs if name in output.metrics] for name in names}
    return {name: (sum(float(s) for s, _ in found), sum(float(n) for _, n in found)) for name, found in pairs.items()}


def _bad_rows(item: Pass) -> list[str]:
    """Names of the rows whose own loss is not finite."""
    bad = (~torch.isfinite(item.output.sequence_losses)).nonzero().squeeze(-1)
    sequences = item.micro.batch.sequence_ids
    named = zip(item.numbers, item.micro.batch.documents, strict=False)  # an empty pass has a document, but no row
    return [d.name or f"row {i}" for i, d in named if bool(torch.isin(sequences[d.row, d.where], bad.cpu()).any())]
