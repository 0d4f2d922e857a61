"""What the supervised and the reinforcement loop share: one optimizer step, what follows it, and the state of a run."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from twinkle_research.data_format import InputFeature
from twinkle_research.errors import CheckpointError, Stopped
from twinkle_research.model.base import NonFiniteLoss
from twinkle_research.trainer.config import OnNan, TrainerConfig

if TYPE_CHECKING:
    from pathlib import Path

    from twinkle_research.checkpoint.format import CheckpointReader
    from twinkle_research.checkpoint.manager import CheckpointManager
    from twinkle_research.distributed.runtime import Runtime
    from twinkle_research.model.base import TwinkleModel
    from twinkle_research.tracking.build import Tracker
    from twinkle_research.trainer.timing import StepClock


class Measures(Protocol):
    """What is measured before training, every ``trainer.eval_every`` steps and after the last step. Collective."""

    @property
    def has_work(self) -> bool: ...
    def metrics(self, step: int) -> dict[str, float]: ...
    def answers(self) -> list[dict[str, Any]]: ...
    def objective(self, metrics: dict[str, float]) -> float | None:
        """The one number that says how good the model is: what a sweep compares."""

    def cost(self, metrics: dict[str, float]) -> float | None:
        """The same, as a number to be small: what ``checkpoint.keep_best`` compares."""


@dataclass
class TrainingLoop(ABC):
    """Everything a loop needs, built by trainer/run.py. ``step`` counts optimizer steps done."""

    cfg: TrainerConfig
    runtime: Runtime
    model: TwinkleModel
    evaluation: Measures
    checkpoints: CheckpointManager
    tracker: Tracker
    clock: StepClock
    total_steps: int
    data_fingerprint: str

    def __post_init__(self) -> None:
        self.step = 0
        self.skipped_steps = 0
        self.saved_step = 0
        self.train_loss: float | None = None
        self.eval_metrics: dict[str, float] = {}
        self.eval_step: int | None = None

    @abstractmethod
    def fit(self) -> dict[str, Any]:
        """Trains to ``total_steps`` and returns ``result()``; raises Stopped, after saving, when any rank was asked to stop."""

    @abstractmethod
    def data_state(self) -> dict[str, Any]:
        """Where the data stand: JSON-able, for trainer_state.json."""

    @abstractmethod
    def load_data_state(self, state: dict[str, Any], reader: CheckpointReader) -> None:
        """Goes to the place that ``data_state`` gave."""

    def open_files(self) -> dict[str, Any]:
        """JSON files that the checkpoint gets beside the state."""
        return {}

    # --- steps --------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        if self.step == 0 and self.evaluation.has_work:
            self.tracker.log_step(0, self.evaluate(0), {})
        self.clock.restart()

    def optimize(self, features: list[InputFeature], **loss_inputs: Any) -> dict[str, Any]:
        """One optimizer step on this rank's ``features``; its metrics."""
        with self.clock.part("train"):
            normalizer = self.model.count(features)
            self.model.forward_backward(features, normalizer=normalizer, **loss_inputs)
            try:
                self.model.clip_grad_and_step(self.cfg.max_grad_norm)
            except NonFiniteLoss as error:
                if self.cfg.on_nan is OnNan.stop:
                    raise
                self.skip_step(error)
            row = self.model.calculate_metric(is_training=True).result
        self.step += 1
        self.train_loss = row["loss"]
        return row | ({"skipped_steps": self.skipped_steps} if self.cfg.on_nan is OnNan.skip else {})

    def skip_step(self, error: NonFiniteLoss) -> None:
        """Leaves the weights as they are and moves the schedule on, so that the step numbers stay true."""
        self.skipped_steps += 1
        self.tracker.message(f"step {self.step + 1} skipped: {error}")
        self.model.zero_grad()
        self.model.lr_step()

    def finish_step(self, row: dict[str, Any], tokens: int) -> None:
        """Evaluates, logs and saves, each where it is due. ``tokens``: that this rank took through the model in this step."""
        if self.evaluation_due():
            row |= self.evaluate(self.step)
        self.tracker.log_step(self.step, row, self.clock.row(int(self.model.shares.all_reduce_sum(tokens))))
        stop = self.runtime.stop_requested()
        if stop or self.step == self.total_steps or self.checkpoints.due(self.step):
            self.save()
        if stop and self.step < self.total_steps:
            self.leave()

    def leave(self) -> NoReturn:
        """Raises Stopped, when what was saved is on disk."""
        self.checkpoints.wait()
        raise Stopped(f"stopped at step {self.step} of {self.total_steps}")

    def result(self) -> dict[str, Any]:
        self.checkpoints.wait()
        measured = self.evaluation.objective(self.eval_metrics)
        return {"step": self.step, "objective": self.train_loss if measured is None else measured}

    # --- evaluation ---------------------------------------------------------------------------------------------

    def evaluation_due(self) -> bool:
        every = self.cfg.eval_every
        return self.evaluation.has_work and (self.step == self.total_steps or bool(every and self.step % every == 0))

    def evaluate(self, step: int) -> dict[str, float]:
        with self.clock.part("eval"):
            metrics = self.evaluation.metrics(step)
            self.tracker.log_samples(step, self.evaluation.answers())
        self.eval_metrics, self.eval_step = metrics, step
        return metrics

    # --- state --------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Writes ``step-NNNNNN``; the metrics files are on disk before it appears."""
        if self.step == self.saved_step:
            return
        with self.clock.part("save"):
            self.tracker.flush()
            metric = self.evaluation.cost(self.eval_metrics) if self.eval_step == self.step else None
            self.checkpoints.save(self.step, self.model, self.state(), metric=metric, files=self.open_files())
        self.saved_step = self.step

    def state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "total_steps": self.total_steps,
            "skipped_steps": self.skipped_steps,
            "data_fingerprint": self.data_fingerprint,
            "loss": self.train_loss if self.train_loss is None or math.isfinite(self.train_loss) else None,
            "eval_metrics": self.eval_metrics,
            **self.data_state(),
            **self.tracker.state(),
        }

    def restore(self, reader: CheckpointReader, path: Path, restart_data: bool) -> None:
        """Continues from a checkpoint of any backend and layout."""
        state = reader.json("trainer_state.json")
        self.model.load_state(reader, state["model"])
        self.step = self.saved_step = state["step"]
        self.skipped_steps = state["skipped_steps"]
        self.train_loss, self.eval_metrics = state["loss"], state["eval_metrics"]
        if state["data_fingerprint"] == self.data_fingerprint:
            self.load_data_state(state, reader)
        elif restart_data:
            self.tracker.message(f"the data is not what {path.name} was trained on: it starts again from its first row")
        else:
            raise CheckpointError(
                f"the data has changed since {path} was written (fingerprint {state['data_fingerprint'][:12]} there, "
                f"{self.data_fingerprint[:12]} now). Put the old data back, or set data.on_change=restart to start the "
                "new data from its first row."
            )
