"""The tracker of a run: one place that every number goes to, and from there to files, W&B, TensorBoard and the screen."""

from __future__ import annotations

import dataclasses
import os
import sys
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from twinkle_research.errors import UserError
from twinkle_research.tracking.config import WandbMode
from twinkle_research.tracking.credentials import resolve_mode
from twinkle_research.tracking.files import RunFiles, plain_row
from twinkle_research.tracking.progress import BarProgress, PlainProgress, QuietProgress, build_progress
from twinkle_research.tracking.rundata import SWEEP
from twinkle_research.tracking.summary import closing_summary
from twinkle_research.tracking.tensorboard import TensorBoardTracker
from twinkle_research.tracking.wandb import WandbIdentity, WandbTracker, choose_run_id

if TYPE_CHECKING:
    from twinkle_research.trainer.config import TrainConfig


class Sink(Protocol):
    """Where rows go. Rows hold plain values, ``step`` first; a value that is not known is None."""

    def log_step(self, row: dict[str, Any], timing: dict[str, Any]) -> None: ...
    def log_samples(self, step: int, rows: list[dict[str, Any]]) -> None: ...
    def flush(self) -> None: ...
    def finish(self, state: str) -> None: ...


class Tracker:
    """Takes the numbers of a run. On every rank but the first it does nothing, so that callers need not ask."""

    def __init__(
        self,
        folder: Path,
        sinks: list[Sink],
        progress: BarProgress | PlainProgress | None,
        *,
        wandb_run_id: str | None = None,
        report: bool = False,
    ):
        self.folder = folder
        self.sinks = sinks
        self.progress = progress
        self.wandb_run_id = wandb_run_id
        self.report = report

    def log_step(self, step: int, metrics: dict[str, Any], timing: dict[str, Any] | None = None) -> None:
        """The row of one optimizer step (or of the evaluation before training, step 0); steps go up.

        metrics: deterministic values only, named as in metrics.jsonl; ``eval/*`` belong to the step they follow.
        timing: values of timing.jsonl. Numbers, strings or None; NaN and infinity are recorded as null.
        """
        row, times = plain_row(step, metrics), plain_row(step, timing or {})
        for sink in self.sinks:
            sink.log_step(row, times)
        if self.progress is not None:
            self.progress.log_step(row, times)

    def log_samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Answers of the model at ``step``: rows with ``prompt``, ``completion`` and whatever else JSON can hold."""
        if rows:
            for sink in self.sinks:
                sink.log_samples(step, rows)

    def message(self, text: str) -> None:
        """A line for the person who watches."""
        if self.progress is not None:
            self.progress.message(text)

    def flush(self) -> None:
        """Makes everything so far durable. Call it before a checkpoint is published: a resume relies on the rows."""
        for sink in self.sinks:
            sink.flush()

    def state(self) -> dict[str, Any]:
        """What the checkpoint carries for ``build_tracker``."""
        return {"wandb_run_id": self.wandb_run_id}

    def finish(self, state: str, objective: float | None = None) -> None:
        """Closes everything and writes report.html. ``state``: finished, failed or stopped."""
        if self.progress is not None:
            self.progress.finish(state)
        try:  # the report first: W&B may take its time, and a job scheduler may not wait
            if self.report:
                if state == "finished" and not isinstance(self.progress, QuietProgress):
                    self.message(closing_summary(self.folder))
                self._write_report(state, objective)
        finally:
            for sink in self.sinks:
                sink.finish(state)
            self.sinks = []

    def _write_report(self, state: str, objective: float | None) -> None:
        from twinkle_research.tracking.report import write_report

        try:
            error = sys.exc_info()[1] if state == "failed" else None  # status.json does not have it yet
            out = self.folder / "report.html"
            path = write_report([self.folder], out, state=state, objective=objective, error=error)
        except (OSError, UserError) as error:  # the run itself is done and saved
            self.message(f"report.html could not be written: {error}")
        else:
            self.message(f"report: {path}")


def build_tracker(
    cfg: TrainConfig,
    folder: Path | Any,
    *,
    total_steps: int,
    resume_step: int,
    wandb_run_id: str | None,
    is_main: bool,
) -> Tracker:
    """The tracker that ``cfg.tracking`` asks for.

    folder: the run folder, as a path or as an object whose ``path`` it is.
    resume_step: step of the checkpoint that this run continues from; the files are cut back to it. 0: from scratch.
    wandb_run_id: what ``Tracker.state`` gave when that checkpoint was saved.

    Raises ConfigError for W&B online without a key, CheckpointError for a damaged metrics file.
    """
    root = Path(folder) if isinstance(folder, str | os.PathLike) else folder.path
    if not is_main:
        return Tracker(root, [], None)
    mode = resolve_mode(cfg.tracking.wandb)
    progress = build_progress(cfg.tracking.progress, total_steps, cfg.tracking.log_every)
    files = RunFiles(root, resume_step)
    if files.missing:
        progress.message(f"metrics.jsonl lacks steps {files.missing[0]} to {files.missing[1]} that the checkpoint has behind it")
    sinks: list[Sink] = [files]
    if cfg.tracking.tensorboard:
        sinks.append(TensorBoardTracker(root / "tensorboard", resume_step))
    run_id = None
    if mode is not WandbMode.disabled:
        run_id = choose_run_id(root / "wandb", wandb_run_id)
        sinks.append(
            WandbTracker(
                wandb_identity(cfg, root),
                root,
                online=mode is WandbMode.online,
                run_id=run_id,
                resume_step=resume_step,
                message=progress.message,
            )
        )
    # Without W&B this time: a later attempt with it is to find its run again.
    return Tracker(root, sinks, progress, wandb_run_id=run_id or wandb_run_id, report=cfg.tracking.report)


def wandb_identity(cfg: TrainConfig, root: Path) -> WandbIdentity:
    """Name and group from the folder where the config gives none; a job of a sweep (``<sweep>/<number>``) is named after and
    grouped by its sweep."""
    wandb = cfg.tracking.wandb
    root = root.resolve()
    in_sweep = root.name.isdigit() and (root.parent.parent.name == "sweeps" or (root.parent / SWEEP).is_file())
    name = f"{root.parent.name}-{root.name}" if in_sweep else root.name
    group = root.parent.name if in_sweep else None
    return WandbIdentity(
        project=wandb.project,
        entity=wandb.entity,
        name=wandb.name or name,
        group=wandb.group or group,
        tags=list(wandb.tags),
        config=plain_config(cfg),
    )


def plain_config(value: Any) -> Any:
    """A tree of config dataclasses as dicts, lists and plain values."""
    if dataclasses.is_dataclass(value):
        return {f.name: plain_config(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): plain_config(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_config(item) for item in value]
    return value.name if isinstance(value, Enum) else value
