"""A run as the trackers see it, in a process of its own that can be killed: ``tracked_run.py '<json>'``."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from children import children_of, is_running, wait_until

from twinkle_research.tracking import build, wandb
from twinkle_research.tracking.config import Progress, TrackingConfig, WandbConfig, WandbMode
from twinkle_research.tracking.wandb_log import recorded_rows
from twinkle_research.trainer.config import SftTrainerConfig, TrainConfig

ROOT = Path(__file__).resolve().parent.parent.parent
API_KEY = "a" * 40


def loss_at(step: int, shift: float = 0.0) -> float:
    return 3.0 * math.exp(-step / 7) + 0.05 * math.sin(step * 1.7) + shift


def config(mode: str = "disabled", **tracking) -> TrainConfig:
    cfg = TrainConfig(trainer=SftTrainerConfig(max_steps=100))
    tracking = {"progress": Progress.plain} | tracking
    cfg.tracking = TrackingConfig(wandb=WandbConfig(mode=WandbMode[mode]), **tracking)
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


def wait_until_recorded(tracker: build.Tracker, last: int) -> None:
    """Until the .wandb file has the last step and the last table: a kill then loses nothing there."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        rows = recorded_rows(tracker.folder / "wandb", tracker.wandb_run_id)
        if "loss" in rows.get(last, {}) and "samples._type" in rows.get(last - last % 2, {}):
            return
        time.sleep(0.1)
    raise TimeoutError(f"step {last} is not in the .wandb file after 60 s")


def own_processes_of_wandb() -> list[int]:
    return [pid for pid in children_of(os.getpid()) if b"wandb-core" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def end_wandb() -> None:
    """SIGTERM for W&B's own process, as a scheduler sends it to all processes of a job."""
    wait_until(own_processes_of_wandb)
    (pid,) = own_processes_of_wandb()
    os.kill(pid, signal.SIGTERM)
    wait_until(lambda: not is_running(pid))


def main(options: dict) -> None:
    folder = Path(options["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    for name, seconds in options.get("limits", {}).items():
        setattr(wandb, name, seconds)
    if options.get("wandb_ends_at") == 0:
        threading.Thread(target=end_wandb).start()
    cfg = config(options["mode"], report=False)
    cfg.tracking.wandb.project = options.get("project", "twinkle_research")
    tracker = build.build_tracker(
        cfg,
        folder,
        total_steps=options.get("total", 10),
        resume_step=options.get("resume", 0),
        wandb_run_id=options.get("run_id"),
        is_main=True,
    )
    what = {name: options[name] for name in ("shift", "eval_every") if name in options}
    seconds = train(tracker, options["first"], options["last"], **what)
    if options.get("recorded"):
        wait_until_recorded(tracker, options["last"])
    if options.get("kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    if options.get("wandb_ends_at"):
        end_wandb()
        seconds += train(tracker, options["last"] + 1, options["wandb_ends_at"], **what)
    begun = time.perf_counter()
    tracker.finish(options.get("state", "finished"))
    finished = time.perf_counter() - begun
    print(json.dumps({"id": tracker.wandb_run_id, "log": sum(seconds), "finish": finished}))


def launcher(folder: Path) -> Callable[..., subprocess.CompletedProcess]:
    """``launch(**options)`` runs this file in ``folder``; ``url`` points W&B there. The result has ``report`` if it ended."""
    home = folder / "home"
    home.mkdir()

    def launch(*, url: str | None = None, **options) -> subprocess.CompletedProcess:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
        environment |= {"HOME": str(home), "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
        if url:
            environment |= {"WANDB_BASE_URL": url, "WANDB_API_KEY": API_KEY}
        options = {"folder": str(folder / "run"), "mode": "online" if url else "offline"} | options
        command = [sys.executable, __file__, json.dumps(options)]
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=120)
        assert done.returncode == (-signal.SIGKILL if options.get("kill") else 0), done.stdout + done.stderr
        if not options.get("kill"):
            done.report = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
        assert list(home.rglob("*")) == [], "nothing may be written to the home folder"
        return done

    return launch


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
