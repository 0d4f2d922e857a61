"""A run as the trackers see it, in a process of its own that can be killed: ``tracked_run.py '<json>'``."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from pathlib import Path

from twinkle_research.tracking import build, wandb
from twinkle_research.tracking.config import Progress, TrackingConfig, WandbConfig, WandbMode
from twinkle_research.trainer.config import SftTrainerConfig, TrainConfig


def loss_at(step: int, shift: float = 0.0) -> float:
    return 3.0 * math.exp(-step / 7) + 0.05 * math.sin(step * 1.7) + shift


def config(mode: str = "disabled", **tracking) -> TrainConfig:
    cfg = TrainConfig(trainer=SftTrainerConfig(max_steps=100))
    cfg.tracking = TrackingConfig(wandb=WandbConfig(mode=WandbMode[mode]), progress=Progress.plain, **tracking)
    return cfg


def train(tracker: build.Tracker, first: int, last: int, *, shift: float = 0.0, eval_every: int = 2) -> list[float]:
    """Logs steps ``first`` to ``last`` as the trainer does; returns the seconds that each call took."""
    seconds = []
    for step in range(first, last + 1):
        metrics = {"loss": loss_at(step, shift), "grad_norm": 1 / (step + 1), "lr": 5e-4, "tokens": 100 + step}
        begun = time.perf_counter()
        if step % eval_every == 0:
            tracker.log_samples(step, [{"prompt": "Who are you?", "completion": f"answer of step {step}"}])
            metrics["eval/loss"] = loss_at(step) + 0.1
        tracker.log_step(step, metrics, {"step_seconds": 0.5, "tokens_per_second": 1234.5 + step, "mfu": None})
        seconds.append(time.perf_counter() - begun)
    return seconds


def main(options: dict) -> None:
    folder = Path(options["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    for name, seconds in options.get("limits", {}).items():
        setattr(wandb, name, seconds)
    begun = time.perf_counter()
    tracker = build.build_tracker(
        config(options["mode"], report=False),
        folder,
        total_steps=options.get("total", 10),
        resume_step=options.get("resume", 0),
        wandb_run_id=options.get("run_id"),
        is_main=True,
    )
    built = time.perf_counter() - begun
    seconds = train(tracker, options["first"], options["last"], shift=options.get("shift", 0.0))
    time.sleep(options.get("sleep", 0.0))
    if options.get("kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.perf_counter()
    tracker.finish(options.get("state", "finished"))
    finished = time.perf_counter() - begun
    print(json.dumps({"id": tracker.wandb_run_id, "build": built, "log": max(seconds), "finish": finished}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
