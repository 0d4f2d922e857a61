"""Features through the model, micro-batch by micro-batch, for one adapter at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from twinkle_research.data_format import InputFeature
from twinkle_research.errors import UserError
from twinkle_research.loss import resolve_loss
from twinkle_research.loss.base import Loss, TokenScores
from twinkle_research.model.base import Result
from twinkle_research.model.passes import Cut, Pass, Trained, book, cut, empty, in_callers_order, summarize
from twinkle_research.model.transformers.packing import check_packing
from twinkle_research.model.transformers.scoring import Scorer
from twinkle_research.processor.base import Batch

if TYPE_CHECKING:
    from twinkle_research.model.transformers.sharding import ShardedModel


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
        for _ in range(missing):
            yield self._pass(trained, empty(trained, loss_inputs, together))

    def micro_batches(
        self, trained: Trained, inputs: Sequence[InputFeature], loss_inputs: dict[str, Any], together: int
    ) -> Iterator[Pass]:
        for part in cut(trained, inputs, loss_inputs, together):
            if part.batch.packed and not trained.processor.packing:
                self._try_out(trained, part.batch)
            yield self._pass(trained, part)

    def _pass(self, trained: Trained, part: Cut) -> Pass:
        micro = self.scorer.prepare(part.batch, trained.training.cur_step, part.samples)
        return Pass(micro, part.features, part.numbers)

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
            item.let_go()

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
        return summarize(trained, items).scores()

    # --- results ------------------------------------------------------------------------------------------------

    def finish(self, trained: Trained, items: list[Pass], divisor: float, normalized: bool, is_training: bool = True) -> Result:
        return book(trained, items, summarize(trained, items), divisor, normalized, is_training)

    def forward(self, trained: Trained, inputs: Sequence[InputFeature], loss_inputs: dict[str, Any]) -> Result:
        trained.passes = list(self.passes(trained, inputs, loss_inputs, trained.loss.rows_together))
        trained.has_loss = False
        for item in trained.passes:
            self.score(trained, item, trained.loss, None)
        return Result(summarize(trained, trained.passes).scores())

    def calculate_loss(self, trained: Trained, loss_inputs: dict[str, Any]) -> float:
        if trained.passes is None:
            raise UserError("calculate_loss needs a forward before it")
        features = in_callers_order(trained.passes)
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
