"""The supervised loop: take a batch, forward and backward, step, log, evaluate, save."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from twinkle_research.data_format import InputFeature
from twinkle_research.errors import ConfigError
from twinkle_research.trainer.config import TrainerConfig
from twinkle_research.trainer.loop import TrainingLoop

if TYPE_CHECKING:
    from twinkle_research.checkpoint.format import CheckpointReader
    from twinkle_research.dataloader import DataLoader, StreamLoader
    from twinkle_research.trainer.preference import PairInputs


def total_steps(cfg: TrainerConfig, steps_per_epoch: int | None) -> int:
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
class SftTrainer(TrainingLoop):
    loader: DataLoader | StreamLoader
    pairs: PairInputs | None = None  # for a loss that compares pairs of answers with a reference

    def fit(self) -> dict[str, Any]:
        self.begin()
        for features in self.batches():
            row = self.optimize(features, **self.loss_inputs(features))
            self.finish_step(row, tokens=sum(f["length"] for f in features))
        return self.result()

    def loss_inputs(self, features: list[InputFeature]) -> dict[str, Any]:
        if self.pairs is None:
            return {}
        with self.clock.part("reference"):
            return self.pairs(features)

    def batches(self) -> Iterator[list[InputFeature]]:
        """This rank's share of one global batch a step, epoch after epoch, until the last step."""
        while self.step < self.total_steps:
            before = self.step
            for features in self.loader:
                yield features
                if self.step == self.total_steps:
                    return
            # After the rest of a pass that gave nothing (StreamLoader), no step was there to ask.
            if self.step == before and self.runtime.stop_requested():
                self.leave()

    def data_state(self) -> dict[str, Any]:
        return {"epoch": self.loader.epoch, **self.loader.get_state()}

    def load_data_state(self, state: dict[str, Any], reader: CheckpointReader) -> None:
        self.loader.load_state(state)
