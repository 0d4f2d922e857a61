"""What turns gradients into updates: the accumulation window, clipping, optimizer, schedule. One for each adapter.

Independent of how the forward pass is done, so every backend that has torch parameters uses it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from twinkle_research.errors import CheckpointError, ConfigError, UserError
from twinkle_research.metric import LossMetric, Meter, StepRecord, TrainMetric
from twinkle_research.model.base import NonFiniteLoss
from twinkle_research.model.gradients import Gradients
from twinkle_research.model.layout import WHOLE, Layout
from twinkle_research.model.optimizer import Optimizer, OptimizerSpec
from twinkle_research.model.schedule import Schedule, build_schedule

if TYPE_CHECKING:
    from twinkle_research.distributed.runtime import Runtime


@dataclass
class Window:
    """The calls since the last optimizer step."""

    calls: int = 0  # of clip_grad_and_step
    has_gradients: bool = False
    normalized: bool | None = None  # whether the caller passed the normaliser; None before the first forward_backward
    count: float = 0.0  # this rank's share of the normaliser, where the caller passed none
    reduced: bool = False  # summed over ranks and divided
    norm: float = 0.0
    bad_loss: bool = False
    bad_rows: list[str] = field(default_factory=list)


class TrainingState:
    """``parameters``: name -> what is trained, this rank's part of it where ``layout`` shards. ``hidden_matrices``: those of
    them that Muon may orthogonalise."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        runtime: Runtime,
        hidden_matrices: Collection[str] = (),
        gradient_accumulation_steps: int = 1,
        layout: Layout = WHOLE,
    ) -> None:
        if type(gradient_accumulation_steps) is not int or gradient_accumulation_steps < 1:
            raise ConfigError(f"gradient_accumulation_steps must be a whole number >= 1, got {gradient_accumulation_steps!r}")
        self.parameters = dict(parameters)
        self.runtime = runtime
        self.hidden_matrices = hidden_matrices
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self.layout = layout
        self.gradients = self._new_gradients()
        self.optimizer: Optimizer | None = None
        self._schedule_for: Callable[..., Schedule] = partial(build_schedule, "constant")
        self.schedule = self._schedule_for()
        self.schedule_position = 0
        self.cur_step = 0  # calls of clip_grad_and_step or step
        self.window = Window()
        self._lr_step_due = False
        self.meters = {True: Meter([LossMetric(), TrainMetric()]), False: Meter([LossMetric()])}

    # --- what a backend may do its own way ----------------------------------------------------------------------

    def _new_gradients(self) -> Gradients:
        return Gradients(self.parameters, self.layout)

    def _new_optimizer(self, spec: OptimizerSpec) -> Optimizer:
        return Optimizer(self.parameters, spec, self.hidden_matrices, self.layout)

    def _norm(self, norm_type: float) -> float:
        return self.gradients.norm(self.runtime, norm_type)

    def _update(self, multiplier: float) -> None:
        self._optimizer().step(self.gradients.tensors(), multiplier)

    # --- set-up -------------------------------------------------------------------------------------------------

    def add_parameters(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Trains these too. Before the optimizer is set and the first gradient comes."""
        if self.optimizer is not None or self.window.has_gradients:
            raise UserError("what is trained cannot change any more: add to it before set_optimizer")
        self.parameters |= parameters
        self.gradients.close()
        self.gradients = self._new_gradients()

    def set_optimizer(self, spec: OptimizerSpec) -> None:
        if spec.options.get("nesterov") and not spec.options["momentum"]:
            raise ConfigError("optimizer.nesterov=true has no effect without optimizer.momentum > 0")
        self.schedule = self._schedule_for(base_lr=spec.lr)
        self.optimizer = self._new_optimizer(spec)

    def set_schedule(self, schedule: Any, total_steps: int | None = None, **options: Any) -> None:
        """Before or after ``set_optimizer``: a schedule that ends at a learning rate takes the optimizer's as its peak."""
        if "base_lr" in options:
            raise ConfigError("a schedule has no option 'base_lr': its peak is the optimizer's lr")
        schedule_for = partial(build_schedule, schedule, total_steps=total_steps, **options)
        self.schedule = schedule_for(base_lr=self.optimizer.spec.lr if self.optimizer else 1.0)
        self._schedule_for = schedule_for

    @property
    def lr(self) -> float:
        """The learning rate that the next step uses."""
        return self._optimizer().spec.lr * self.schedule.multiplier(self.schedule_position)

    def _optimizer(self) -> Optimizer:
        if self.optimizer is None:
            raise UserError("no optimizer: call set_optimizer first")
        return self.optimizer

    # --- accumulation -------------------------------------------------------------------------------------------

    def open(self, normalizer: float | None) -> float:
        """Before a backward pass: what its loss is divided by."""
        given = normalizer is not None
        if given and not 0 <= float(normalizer) < math.inf:
            raise ConfigError(f"normalizer must be finite and >= 0, got {normalizer}")
        if self.window.normalized not in (None, given):
            raise UserError("a normalizer was passed to some calls of this accumulation window and not to others")
        if self.window.reduced:
            raise UserError("the gradients were clipped: call step (and zero_grad) before the next backward")
        self.window.normalized = given
        self.window.has_gradients = True
        return float(normalizer) if given else 1.0

    def record(self, count: int, bad_rows: list[str], bad_loss: bool) -> None:
        """After a backward pass."""
        if not self.window.normalized:
            self.window.count += count
        self.window.bad_loss |= bad_loss
        self.window.bad_rows += bad_rows

    def _reduce(self, norm_type: float) -> None:
        """Sums gradients over ranks and divides by the window's normaliser. Raises NonFiniteLoss. Collective."""
        window = self.window
        if window.reduced:
            return
        if not self.runtime.any(window.has_gradients):
            raise UserError("there is no gradient: call forward_backward first")
        self.gradients.all_reduce(self.runtime)
        # A rank without rows has not heard whether the others passed a normaliser: its count is then 0 either way.
        count = self.runtime.all_reduce_sum(float(window.count))
        divisor = max(count, 1.0)
        window.norm = self._norm(norm_type) / divisor
        self._check_finite(window)
        self.gradients.scale_(1.0 / divisor)
        window.reduced = True

    def _check_finite(self, window: Window) -> None:
        if not self.runtime.any(window.bad_loss) and math.isfinite(window.norm):
            return
        rows = sorted({row for rank in self.runtime.gather_objects(window.bad_rows) for row in rank})
        what = "loss" if rows or self.runtime.any(window.bad_loss) else "gradient norm"
        for meter in self.meters.values():
            meter.on_step(StepRecord(window.norm, self.lr))
        self.discard_window()
        self._lr_step_due = True
        named = f" in {', '.join(rows[:8])}{' ...' if len(rows) > 8 else ''}" if rows else ""
        raise NonFiniteLoss(f"the {what} is NaN or infinite{named}; weights and optimizer are unchanged", rows)

    def clip_grad_norm(self, max_norm: float | None, norm_type: float = 2) -> float:
        """At the end of a window: the global norm before clipping to ``max_norm``. Inside one: 0.0, nothing happens."""
        if self.window.calls + 1 < self.gradient_accumulation_steps:
            return 0.0
        return self._clip(max_norm, norm_type)

    def _clip(self, max_norm: float | None, norm_type: float) -> float:
        self._reduce(norm_type)
        if max_norm is not None and max_norm < self.window.norm:
            self.gradients.scale_(max_norm / (self.window.norm + 1e-6))  # torch's clip_grad_norm_
        return self.window.norm

    def step(self) -> None:
        """Counts a call; the last one of a window updates the parameters. Gradients stay until zero_grad."""
        self._optimizer()
        self.cur_step += 1
        self.window.calls += 1
        if self.window.calls >= self.gradient_accumulation_steps:
            self._apply()

    def _apply(self) -> None:
        self._reduce(2)
        record = StepRecord(self.window.norm, self.lr)
        self.layout.release()
        self._update(self.schedule.multiplier(self.schedule_position))
        for meter in self.meters.values():
            meter.on_step(record)
        self.window = Window()
        self._lr_step_due = True

    def zero_grad(self) -> None:
        """Clears the gradients, unless a window is open: those are still to be applied."""
        if self.window.calls == 0:
            self.discard_window()

    def discard_window(self) -> None:
        self.gradients.clear()
        self.window = Window()

    def lr_step(self) -> None:
        """Moves the schedule on, once for each optimizer step (or step left out because of a non-finite loss)."""
        self.schedule_position += self._lr_step_due
        self._lr_step_due = False

    def clip_grad_and_step(self, max_norm: float | None, norm_type: float = 2) -> None:
        self._optimizer()
        try:
            self.clip_grad_norm(max_norm, norm_type)
        except NonFiniteLoss:
            self.cur_step += 1
            raise
        self.step()
        self.zero_grad()
        self.lr_step()

    def finish_window(self, max_norm: float | None, norm_type: float = 2) -> None:
        if self.window.calls == 0:
            return
        self._clip(max_norm, norm_type)
        self._apply()
        self.discard_window()
        self.lr_step()

    # --- state --------------------------------------------------------------------------------------------------

    def consolidate_window(self) -> None:
        """Puts the gradients and counts of an open window on rank 0 alone, so that it can be saved. Collective.

        Sharded gradients stay where they are.
        """
        self.window.has_gradients = self.runtime.any(self.window.has_gradients)
        if not self.window.has_gradients:
            return
        if self.window.reduced:
            raise UserError("the gradients were clipped already: save before clip_grad_norm or after step")
        self.gradients.consolidate(self.runtime)
        count = self.runtime.all_reduce_sum(float(self.window.count))
        self.window.count = count if self.runtime.rank == 0 else 0.0

    def state(self) -> dict[str, Any]:
        """JSON-able: everything but tensors."""
        window = {
            key: value for key, value in asdict(self.window).items() if key in ("calls", "has_gradients", "normalized", "count")
        }
        return {
            "cur_step": self.cur_step,
            "optimizer_steps": self.optimizer.steps_done if self.optimizer else 0,
            "schedule_position": self.schedule_position,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            "window": window,
        }

    def check_load(self, state: Mapping[str, Any]) -> tuple[int, int, Window]:
        """``cur_step``, ``schedule_position`` and the window of ``state``. Raises CheckpointError where it is damaged or its
        window cannot go on here."""
        try:
            step, position, window = int(state["cur_step"]), int(state["schedule_position"]), Window(**state["window"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the training state of the checkpoint is damaged: {error!r}") from error
        if window.calls and state["gradient_accumulation_steps"] != self.gradient_accumulation_steps:
            raise CheckpointError(
                f"the checkpoint was saved inside an accumulation window of {state['gradient_accumulation_steps']} calls; "
                f"gradient_accumulation_steps={self.gradient_accumulation_steps} cannot continue it"
            )
        return step, position, window

    def load(self, state: Mapping[str, Any]) -> None:
        """Inverse of ``state``; the optimizer's tensors and the window's gradients are loaded by name elsewhere."""
        self.cur_step, self.schedule_position, self.window = self.check_load(state)
        self.gradients.clear()
        if self.runtime.rank != 0:
            self.window.count = 0.0
