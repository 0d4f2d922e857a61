"""Features through the model, micro-batch by micro-batch, for one adapter at a time."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
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
from twinkle_research.model.training import TrainingState
from twinkle_research.model.transformers.packing import check_packing
from twinkle_research.model.transformers.scoring import MicroBatch, Scorer, by_document
from twinkle_research.processor.base import LOSS_INPUTS, Batch, InputProcessor
from twinkle_research.processor.features import as_features

if TYPE_CHECKING:
    from twinkle_research.model.transformers.reference import Reference
    from twinkle_research.model.transformers.sharding import ShardedModel
    from twinkle_research.model.transformers.value_head import ValueHead
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


class Compute:
    """``activate(trained)`` makes an adapter the one that the model runs with."""

    def __init__(self, scorer: Scorer, shards: ShardedModel | None, activate: Callable[[Trained], None]) -> None:
        self.scorer = scorer
        self.shards = shards
        self._activate = activate
        self._keeps_apart = False  # packed documents, as far as it was tried out

    @contextmanager
    def active(self, trained: Trained, item: Pass) -> Iterator[None]:
        self._activate(trained)
        with self.scorer.active(item.micro):
            yield

    # --- forward and backward -----------------------------------------------------------------------------------

    def passes(
        self, trained: Trained, inputs: Sequence[InputFeature], loss_inputs: dict[str, Any], together: int
    ) -> Iterator[Pass]:
        """This rank's micro-batches. Where the model is sharded every pass is collective: the ranks with fewer of them
        go through empty ones. ``together``: as ``Loss.rows_together``."""
        if self.shards is None:
            yield from self.micro_batches(trained, inputs, loss_inputs, together)
            return
        items = list(self.micro_batches(trained, inputs, loss_inputs, together))
        missing = trained.training.runtime.max(len(items)) - len(items)
        yield from items
        zeros = {name: None if values is None else [0.0] * together for name, values in loss_inputs.items()}
        for _ in range(missing):
            empty = [{"input_ids": [0], "labels": [IGNORE_INDEX]}] * together
            batch = trained.processor.collate(empty, "cpu", **zeros)
            yield Pass(self.scorer.prepare(batch, trained.training.cur_step, [0] * together), [], [])

    def micro_batches(
        self, trained: Trained, inputs: Sequence[InputFeature], loss_inputs: dict[str, Any], together: int
    ) -> Iterator[Pass]:
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
            if batch.packed and not trained.processor.packing:
                self._try_out(trained, batch)
            micro = self.scorer.prepare(batch, trained.training.cur_step, [first + i for i in part])
            yield Pass(micro, features, part)
        trained.first_sample = first + len(inputs)

    def _try_out(self, trained: Trained, batch: Batch) -> None:
        """For rows that came packed. A processor that packs was tried out when it was set."""
        config = self.scorer.module.config
        varlen = config.get_text_config()._attn_implementation not in ("sdpa", "eager")  # finds documents in a single row only
        if self.shards is not None or (varlen and len(batch.input_ids) > 1):
            raise UserError(
                "a row whose position_ids restart holds several documents; with flash attention and with a sharded model "
                "this needs set_processor('InputProcessor', packing=True)"
            )
        if not self._keeps_apart:
            check_packing(self, trained, config, self.scorer.body.dtype)
            self._keeps_apart = True

    def score(self, trained: Trained, item: Pass, loss: Loss, divisor: float | None) -> None:
        """A micro-batch without a trained position adds nothing, so it does not run where no other rank waits for it."""
        if not item.micro.num_tokens and not self.shards:
            return

        def run() -> TokenScores:
            return self.scorer.scores(item.micro, loss, divisor, trained.value_head)

        with self.active(trained, item):
            item.scores = self.shards.run(run) if self.shards else run()

    def add_loss(self, trained: Trained, item: Pass, divisor: float) -> None:
        if item.scores is not None:
            item.output = trained.loss(item.scores, item.micro.inputs, divisor)

    def backward(self, trained: Trained, item: Pass) -> None:
        if item.output is not None:
            with self.active(trained, item):
                item.output.loss.backward()
            item.output.loss = item.output.loss.detach()
            values = item.scores.values
            # Lets go of the graph.
            item.scores = TokenScores(item.scores.logprobs.detach(), values=None if values is None else values.detach())

    def plain_scores(
        self, trained: Trained, inputs: Sequence[InputFeature], weights: AbstractContextManager
    ) -> dict[str, list[list[float]]]:
        """Per row ``logps``, and ``values`` of a value head, at its labels inside the context ``weights``; no gradient, no
        record. Collective."""
        plain = resolve_loss("CrossEntropyLoss")
        first, items = trained.first_sample, []
        with torch.no_grad(), weights:
            for item in self.passes(trained, inputs, {}, together=1):
                self.score(trained, item, plain, None)
                items.append(item)
        trained.first_sample = first  # scoring in between does not change the dropout masks of the step
        return {"logps": in_order(items, "logprobs")} | _values(trained, items)

    # --- results ------------------------------------------------------------------------------------------------

    def finish(self, trained: Trained, items: list[Pass], divisor: float, normalized: bool, is_training: bool = True) -> Result:
        """Reads the results off the device, once for the whole call, and books them."""
        training = trained.training
        features = _features(items)
        ran = [item for item in items if item.output is not None]
        losses = torch.stack([item.output.loss.detach() for item in ran]).tolist() if ran else []
        loss = sum(losses)
        count = trained.loss.count(features)
        logps = in_order(items, "logprobs")
        tokens = sum(item.micro.num_tokens for item in items)
        if not tokens and (features or training.runtime.world_size == 1):  # of several ranks some may have no rows
            log.warning("no label of these %d rows is trained (all are %d): the loss is 0", len(features), IGNORE_INDEX)
        extra = _extra_sums([item.output for item in ran])
        maxima = largest(*[{name: float(value) for name, value in item.output.maxima.items()} for item in ran])
        training.meters[is_training].accumulate(CallRecord(loss * divisor, count, tokens, extra, maxima, features, logps))
        if is_training:
            bad = [item for item, value in zip(ran, losses, strict=True) if not math.isfinite(value)]
            training.record(count, [row for item in bad for row in _bad_rows(item)], bool(bad))
        result = {"loss": loss if normalized else loss / max(count, 1), "num_tokens": tokens, "logps": logps}
        return Result(result | _values(trained, items))

    def forward(self, trained: Trained, inputs: Sequence[InputFeature], loss_inputs: dict[str, Any]) -> Result:
        trained.passes = list(self.passes(trained, inputs, loss_inputs, trained.loss.rows_together))
        trained.has_loss = False
        for item in trained.passes:
            self.score(trained, item, trained.loss, None)
        return Result({"logps": in_order(trained.passes, "logprobs")} | _values(trained, trained.passes))

    def calculate_loss(self, trained: Trained, loss_inputs: dict[str, Any]) -> float:
        if trained.passes is None:
            raise UserError("calculate_loss needs a forward before it")
        features = _features(trained.passes)
        if loss_inputs:
            own = [item for item in trained.passes if item.features]
            first, trained.first_sample = trained.first_sample, 0
            others = self.micro_batches(trained, features, loss_inputs, trained.loss.rows_together)
            for item, other in zip(own, others, strict=True):
                item.micro.inputs = other.micro.inputs
            trained.first_sample = first
        for item in trained.passes:
            self.add_loss(trained, item, 1.0)
        trained.has_loss = True
        total = sum(float(item.output.loss.detach()) for item in trained.passes if item.output is not None)
        return total / max(trained.loss.count(features), 1)

    def backward_all(self, trained: Trained) -> None:
        if trained.passes is None or not trained.has_loss:
            raise UserError("backward needs a forward and a calculate_loss before it")
        items, trained.passes = trained.passes, None
        trained.training.open(None)
        for item in items:
            self.backward(trained, item)
        self.finish(trained, items, 1.0, False)


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


def _features(items: list[Pass]) -> list[InputFeature]:
    """In the caller's order."""
    numbered = [pair for item in items for pair in zip(item.numbers, item.features, strict=True)]
    return [feature for _, feature in sorted(numbered, key=lambda pair: pair[0])]


def in_order(items: list[Pass], name: str) -> list[list[float]]:
    """Values of TokenScores' field ``name`` per row, in the caller's order, aligned with the labels."""
    numbered = [
        pair
        for item in items
        if item.features
        for pair in zip(item.numbers, by_document(item.micro, item.scores and getattr(item.scores, name)), strict=True)
    ]
    return [values for _, values in sorted(numbered, key=lambda pair: pair[0])]


def _values(trained: Trained, items: list[Pass]) -> dict[str, list[list[float]]]:
    return {"values": in_order(items, "values")} if trained.value_head else {}


def _extra_sums(outputs: list[LossOutput]) -> dict[str, tuple[float, float]]:
    names = dict.fromkeys(name for output in outputs for name in output.metrics)
    pairs = {name: [output.metrics[name] for output in outputs if name in output.metrics] for name in names}
    return {name: (sum(float(s) for s, _ in found), sum(float(n) for _, n in found)) for name, found in pairs.items()}


def _bad_rows(item: Pass) -> list[str]:
    """Names of the rows whose own loss is not finite."""
    bad = (~torch.isfinite(item.output.sequence_losses)).nonzero().squeeze(-1)
    sequences = item.micro.batch.sequence_ids
    named = zip(item.numbers, item.micro.batch.documents, strict=False)  # an empty pass has a document, but no row
    return [d.name or f"row {i}" for i, d in named if bool(torch.isin(sequences[d.row, d.where], bad.cpu()).any())]
