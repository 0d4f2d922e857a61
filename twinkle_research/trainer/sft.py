"""The supervised loop: take a batch, forward and backward, step, log, evaluate, save."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from twinkle_research.data_format import InputFeature
from twinkle_research.errors import CheckpointError, ConfigError, Stopped
from twinkle_research.model.base import NonFiniteLoss
from twinkle_research.trainer.config import OnNan, SftTrainerConfig

if TYPE_CHECKING:
    from pathlib import Path

    from twinkle_research.checkpoint.format import CheckpointReader
    from twinkle_research.checkpoint.manager import CheckpointManager
    from twinkle_research.dataloader import DataLoader, StreamLoader
    from twinkle_research.distributed.runtime import Runtime
    from twinkle_research.model.base import TwinkleModel
    from twinkle_research.tracking.build import Tracker
    from twinkle_research.trainer.evaluation import Evaluation
    from twinkle_research.trainer.timing import StepClock


def total_steps(cfg: SftTrainerConfig, steps_per_epoch: int | None) -> int:
    """Optimizer steps of the whole run; both limits unset means one epoch.

    ``steps_per_epoch=None``: not known before an epoch has ended, so ``max_steps`` must be set and ``epochs`` must not.
    """
    if steps_per_epoch is None:
        if cfg.max_steps is None or cfg.epochs is not None:
            raise ConfigError("data.streaming=true shows its length at its end only: give trainer.max_steps, not trainer.epochs")
        return cfg.max_steps
    epochs = cfg.epochs if cfg.epochs is not None or cfg.max_steps is not None else 1
    limits = [cfg.max_steps, None if epochs is None else epochs * steps_per_epoch]
    return min(limit for limit in limits if limit is not None)


@dataclass
class SftTrainer:
    """Everything the loop needs, built by trainer/run.py. ``step`` counts optimizer steps done."""

    cfg: SftTrainerConfig
    runtime: Runtime
    model: TwinkleModel
    loader: DataLoader | StreamLoader
    evaluation: Evaluation
    checkpoints: CheckpointManager
    tracker: Tracker
    clock: StepClock
    total_steps: int
    data_fingerprint: str
    step: int = 0
    skipped_steps: int = 0
    saved_step: int = 0
    eval_loss: float | None = None
    eval_step: int | None = None
    train_loss: float | None = None

    def fit(self) -> dict[str, Any]:
        """Trains to ``total_steps``; raises Stopped after saving when any rank was asked to stop."""
        if self.step == 0 and self.evaluation.has_work:
            self.tracker.log_step(0, self.evaluate(0), {})
        self.clock.restart()
        for features in self.batches():
            row = self.train_step(features)
            if self.evaluation_due():
                row |= self.evaluate(self.step)
            self.tracker.log_step(self.step, row, self.clock.row(self.tokens_of(features)))
            stop = self.runtime.stop_requested()
            if stop or self.step == self.total_steps or self.checkpoints.due(self.step):
                self.save()
            if stop and self.step < self.total_steps:
                self.checkpoints.wait()
                raise Stopped(f"stopped at step {self.step} of {self.total_steps}")
        self.checkpoints.wait()
        return {"step": self.step, "objective": self.train_loss if self.eval_loss is None else self.eval_loss}

    def batches(self) -> Iterator[list[InputFeature]]:
        """This rank's share of one global batch a step, epoch after epoch, until the last step."""
        while self.step < self.total_steps:
            for features in self.loader:
                yield features
                if self.step == self.total_steps:
                    return

    def train_step(self, features: list[InputFeature]) -> dict[str, Any]:
        with self.clock.part("train"):
            normalizer = self.model.count(features)
            self.model.forward_backward(features, normalizer=normalizer)
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

    def tokens_of(self, features: list[InputFeature]) -> int:
        return int(self.runtime.all_reduce_sum(sum(f["length"] for f in features)))

    def evaluation_due(self) -> bool:
        every = self.cfg.eval_every
        return self.evaluation.has_work and (self.step == self.total_steps or bool(every and self.step % every == 0))

    def evaluate(self, step: int) -> dict[str, float]:
        with self.clock.part("eval"):
            metrics = self.evaluation.metrics()
            self.tracker.log_samples(step, self.evaluation.answers())
        self.eval_loss, self.eval_step = metrics.get("eval/loss"), step
        return metrics

    # --- state --------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Writes ``step-NNNNNN``; the metrics files are on disk before it appears."""
        if self.step == self.saved_step:
            return
        with self.clock.part("save"):
            self.tracker.flush()
            metric = self.eval_loss if self.eval_step == self.step else None
            self.checkpoints.save(self.step, self.model, self.state(), metric=metric)
        self.saved_step = self.step

    def state(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "epoch": self.loader.epoch,
            "total_steps": self.total_steps,
            "skipped_steps": self.skipped_steps,
            "data_fingerprint": self.data_fingerprint,
            "loss": self.train_loss if self.train_loss is None or math.isfinite(self.train_loss) else None,
            "eval_loss": self.eval_loss,
            **self.loader.get_state(),
            **self.tracker.state(),
        }

    def restore(self, reader: CheckpointReader, path: Path, restart_data: bool) -> None:
        """Continues from a checkpoint of any backend and layout."""
        state = reader.json("trainer_state.json")
        self.model.load_state(reader, state["model"])
        self.step = self.saved_step = state["step"]
        self.skipped_steps = state["skipped_steps"]
        self.train_loss, self.eval_loss = state["loss"], state["eval_loss"]
        if state["data_fingerprint"] == self.data_fingerprint:
            self.loader.load_state(state)
        elif restart_data:
            self.tracker.message(f"the data is not what {path.name} was trained on: it starts again from its first row")
        else:
            raise CheckpointError(
                f"the data has changed since {path} was written (fingerprint {state['data_fingerprint'][:12]} there, "
                f"{self.data_fingerprint[:12]} now). Put the old data back, or set data.on_change=restart to start the "
                "new data from its first row."
            )
