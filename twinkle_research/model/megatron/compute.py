"""Features through the model in mcore's schedules, for one adapter at a time."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from twinkle_research.data_format import InputFeature
from twinkle_research.errors import UserError
from twinkle_research.loss import resolve_loss
from twinkle_research.loss.base import Loss, TokenScores
from twinkle_research.model.base import Result
from twinkle_research.model.megatron.batch import LocalBatch, local_parts
from twinkle_research.model.megatron.scoring import Scorer
from twinkle_research.model.megatron.shim import device_shim
from twinkle_research.model.passes import Cut, Pass, Summary, Trained, book, cut, empty, summarize
from twinkle_research.processor.features import as_features

if TYPE_CHECKING:
    from twinkle_research.model.megatron.build import PolicyModel
    from twinkle_research.model.megatron.mesh import Mesh

# What becomes of the scores of a micro-batch: a scalar with their graph.
Finish = Callable[[Pass], Tensor]
_NO_COUNT = torch.zeros((), dtype=torch.int)  # mcore is told nothing of tokens: what is to be divided is divided by then


class Compute:
    """``vocabulary_size``: without padding. ``activate(trained)`` makes an adapter the one that the model runs with."""

    def __init__(
        self, chunks: Sequence[PolicyModel], mesh: Mesh, vocabulary_size: int, *, activate: Callable[[Trained], None]
    ) -> None:
        self.chunks = list(chunks)
        self.mesh = mesh
        self.vocabulary_size = vocabulary_size
        self.device = mesh.runtime.device
        self.dtype = torch.promote_types(self.chunks[0].config.params_dtype, torch.float32)  # of the scores
        self._activate = activate
        # Whether stages do not tell each other how long a micro-batch is.
        self._one_length = mesh.pp.size > 1 and not self.chunks[0].config.variable_seq_lengths
        self.scorer: Scorer | None = None
        if mesh.pp.is_last:
            self.scorer = Scorer(self.chunks[-1], mesh, vocabulary_size, self.dtype, mesh.layout.logits_chunk)

    def run(
        self, trained: Trained, inputs: Sequence[InputFeature], loss_inputs: dict[str, Any], divisor: float, *,
        normalized: bool, backward: bool, is_training: bool,
    ) -> Result:  # fmt: skip
        """The loss of this data-parallel share's rows and, with ``backward``, its gradient. All processes of the share get the
        same result. ``divisor``: of the loss; ``normalized``: whether it is the caller's. Collective."""
        loss = trained.loss
        if "values" in loss.needs and trained.value_head is None:
            raise UserError(f"{type(loss).__name__} needs values: call add_value_head first")
        first = trained.first_sample
        items = self._passes(trained, inputs, loss_inputs, loss.rows_together)
        if self.mesh.pp.size > 1 and backward:
            self._try_out(loss, items, divisor)

        def finish(item: Pass) -> Tensor:
            output = loss(item.scores, item.micro.inputs, divisor)
            total = output.loss
            if self.mesh.layout.overlap_grad_reduce:  # every parameter must get a gradient, also those that the loss ignores
                total = total + 0.0 * sum(x.sum() for x in (item.scores.logprobs, item.scores.values) if x is not None)
            if item.micro.num_tokens:
                item.output = output
            return total

        self._schedule(trained, items, loss, divisor if backward else None, finish, backward)
        if not backward:
            trained.first_sample = first  # scoring in between does not change the dropout masks of the step
        return book(trained, items, self._summary(trained, items), divisor, normalized, is_training)

    def plain_scores(
        self, trained: Trained, inputs: Sequence[InputFeature], weights: AbstractContextManager
    ) -> dict[str, list[list[float]]]:
        """Per row ``logps``, and ``values`` of a value head, at its labels inside the context ``weights``; no gradient, no
        record. Collective."""
        first = trained.first_sample
        with weights:
            items = self._passes(trained, inputs, {}, together=1)
            self._schedule(
                trained, items, resolve_loss("CrossEntropyLoss"), None, lambda item: item.scores.logprobs.sum(), backward=False
            )
        trained.first_sample = first
        return self._summary(trained, items).scores()

    # --- micro-batches ------------------------------------------------------------------------------------------

    def _passes(self, trained: Trained, inputs: Sequence[InputFeature], loss_inputs: dict[str, Any], together: int) -> list[Pass]:
        """Checked before any of them runs, as a process that fails in the middle leaves others waiting. Where shares wait for
        each other in their passes (experts, gradients that are summed meanwhile) all have the same number, empty ones if
        need be; interleaved stages want a multiple of their number. ``together``: as ``Loss.rows_together``."""
        inputs = as_features(inputs)
        self._check_same_rows(inputs)
        items = [self._pass(trained, part) for part in cut(trained, inputs, loss_inputs, together)]
        layout, count = self.mesh.layout, len(items)
        if self.mesh.experts_join_shares or layout.overlap_grad_reduce or layout.overlap_param_gather:
            count = self.mesh.shares.max(count)
        if layout.virtual_stages > 1:
            count += -count % self.mesh.pp.size
        items += [self._pass(trained, empty(trained, loss_inputs, together)) for _ in range(count - len(items))]
        if self._one_length:
            longest = max((sum(item.micro.lengths) for item in items), default=0)
            for item in items:
                item.micro.fill_up(longest)
        return items

    def _check_same_rows(self, inputs: Sequence[InputFeature]) -> None:
        """The processes of a share compute its rows together; with different ones they would wait for each other for ever."""
        groups = [axis.group for axis in (self.mesh.tp, self.mesh.pp, self.mesh.cp) if axis.size > 1]
        if not groups:
            return
        digest = zlib.crc32(repr([(len(row["input_ids"]), row["input_ids"][:8]) for row in inputs]).encode())
        bounds = torch.tensor([digest, -digest], device=self.device)
        for group in groups:
            dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=group)
        if int(bounds[0]) != -int(bounds[1]):
            rank, size = self.mesh.data_parallel
            raise UserError(
                f"the processes of one data-parallel share were given different rows: all with data_parallel == {rank, size} "
                "must be given the same"
            )

    def _pass(self, trained: Trained, part: Cut) -> Pass:
        context, multiple = self.mesh.cp, self.mesh.tp.size if self.mesh.sequence_parallel else 1
        micro = LocalBatch.of(
            part.batch, trained.training.cur_step, part.samples, vocabulary=self.vocabulary_size, device=self.device,
            dtype=self.dtype, **local_parts(part.batch, context.rank, context.size, multiple),
        )  # fmt: skip
        return Pass(micro, part.features, part.numbers)

    def _try_out(self, loss: Loss, items: list[Pass], divisor: float) -> None:
        """Only the last stage computes the loss. What it would refuse, such as inputs that it lacks, is so refused by all."""
        for item in items[:1]:
            scores = {
                name: torch.zeros_like(item.micro.inputs.mask, requires_grad=True) for name in ("logprobs", *sorted(loss.needs))
            }
            loss(TokenScores(**scores), item.micro.inputs, divisor)

    # --- the model ----------------------------------------------------------------------------------------------

    def _schedule(
        self, trained: Trained, items: list[Pass], loss: Loss, normalizer: float | None, finish: Finish, backward: bool
    ) -> None:
        """Leaves scores (and what ``finish`` makes of them) in ``items``, on the last stage."""
        if not items:
            return
        self._activate(trained)

        def score(item: Pass, hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
            item.scores = self.scorer.scores(item.micro, hidden, loss, normalizer, trained.value_head)
            total = finish(item).clone()  # mcore empties the tensor that it gets
            item.let_go()
            return total, _NO_COUNT, {}

        def step(iterator: Iterator[Pass], model: nn.Module) -> tuple[Tensor, Callable[[Tensor], Any]]:
            item = next(iterator)
            ids, params = item.micro.inputs_on(self.device)
            # Rotary embeddings are made from the documents' lengths: positions and masks are not read.
            return model(ids, None, None, packed_seq_params=params), partial(score, item)

        with ExitStack() as stack:
            models: list[Any] = self.chunks
            stack.enter_context(device_shim())
            if backward:
                models = stack.enter_context(trained.training.gradients.accumulating())
            else:
                stack.enter_context(torch.no_grad())
            get_forward_backward_func()(
                forward_step_func=step, data_iterator=[iter(items) for _ in models], model=models, num_microbatches=len(items),
                seq_length=sum(items[0].micro.lengths), micro_batch_size=1, forward_only=not backward,
            )  # fmt: skip

    def _summary(self, trained: Trained, items: list[Pass]) -> Summary:
        """What the last stage knows, on all stages."""
        box = [summarize(trained, items) if self.mesh.pp.is_last else None]
        if self.mesh.pp.size > 1:
            dist.broadcast_object_list(box, self.mesh.same_rows[-1], self.mesh.pp.group, self.device)
        return box[0]
