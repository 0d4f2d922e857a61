"""The parts of a supervised run: its rows, its evaluation, its loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import uuid4

from twinkle_research.dataloader import build_loader
from twinkle_research.dataset.build import build_datasets, encoded_cache
from twinkle_research.dataset.features import Features
from twinkle_research.errors import DataError
from twinkle_research.loss import build_loss
from twinkle_research.loss.preference import PreferenceLoss
from twinkle_research.trainer.evaluation import Evaluation
from twinkle_research.trainer.preference import PairEvaluation, PairInputs
from twinkle_research.trainer.preview import print_preview
from twinkle_research.trainer.sft import SftTrainer, total_steps

if TYPE_CHECKING:
    from pathlib import Path

    from twinkle_research.dataset import IterableDataset
    from twinkle_research.distributed.runtime import Runtime
    from twinkle_research.model.base import TwinkleModel
    from twinkle_research.template import Template
    from twinkle_research.trainer.config import TrainConfig
    from twinkle_research.trainer.timing import StepClock


class SupervisedParts:
    """The rows are read before the model, so that a bad row costs no loading. Collective."""

    def __init__(self, cfg: TrainConfig, template: Template, runtime: Runtime) -> None:
        self.cfg = cfg
        self.template = template
        self.runtime = runtime
        self.train_rows, self.eval_rows, self.fingerprint = load_rows(cfg, template, runtime)
        if cfg.data.preview and runtime.is_main:
            print_preview(self.train_rows, template, cfg.data.preview)

    def attach(self, model: TwinkleModel, model_folder: Path, clock: StepClock) -> None:
        cfg, loss = self.cfg, build_loss(self.cfg.loss)
        model.set_loss(loss)
        compares = isinstance(loss, PreferenceLoss)
        self.pairs = PairInputs(model, loss) if compares and loss.needs_reference else None
        measured = (model, self.template, self.runtime, self.eval_rows, cfg.data.sample_prompts, cfg.trainer.sample_max_tokens)
        self.evaluation = PairEvaluation(*measured, self.pairs) if compares else Evaluation(*measured)
        rank, size = model.data_parallel
        self.loader = build_loader(
            self.train_rows,
            batch_size=cfg.trainer.batch_size,
            shuffle=cfg.data.shuffle,
            seed=cfg.seed,
            dp_rank=rank,
            dp_size=size,
        )

    @property
    def rows_per_epoch(self) -> int | None:
        """None where that is not known before an epoch has ended."""
        return self.train_rows.rows_per_epoch if isinstance(self.train_rows, Features) else None

    def steps(self) -> int:
        return total_steps(self.cfg.trainer, self.loader.steps_per_epoch)

    def loop(self, **common: Any) -> SftTrainer:
        return SftTrainer(**common, loader=self.loader, pairs=self.pairs)

    def close(self) -> None:
        """There is nothing to close."""


def load_rows(cfg: TrainConfig, template: Template, runtime: Runtime) -> tuple[Features | IterableDataset, Features | None, str]:
    """(training rows, held-out rows, fingerprint of the training rows). Collective.

    One rank of each machine encodes what is not encoded yet, while the others wait for it.
    """
    session = runtime.broadcast_object(uuid4().hex if runtime.is_main else None)
    cache = encoded_cache(cfg.data, session, first=runtime.local_rank == 0)
    try:
        train_rows, eval_rows = build_datasets(cfg.data, template, cfg.seed, cache)
        fingerprints = runtime.gather_objects(train_rows.fingerprint)
    finally:
        cache.release()  # all ranks have what they need, or one has failed
    if len(set(fingerprints)) > 1:
        raise DataError(
            "the ranks have different training rows: the files differ between the machines, or data.processor gives other rows "
            "for the same input from one time to the next"
        )
    return train_rows, eval_rows, fingerprints[0]
