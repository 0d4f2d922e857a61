"""The folder of a sweep: ``sweep.json`` lists its jobs, and job N is the run folder ``N``.

What a job's own ``status.json`` says is truer than the list, which is only as new as the process that wrote it: reading a
sweep looks into all its runs, so that it is right also when that process was killed, and for jobs that a cluster runs.
"""

from __future__ import annotations

import difflib
import json
import math
import time
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from twinkle_research.errors import UserError
from twinkle_research.tracking.files import TIMING, read_rows, write_atomic
from twinkle_research.tracking.rundata import SWEEP
from twinkle_research.trainer.rundir import RunFolder
from twinkle_research.trainer.runlock import RunLock, is_held

FORMAT = 1
# ``launcher`` of a sweep that slurm/sweep.sbatch runs: it has no process of its own.
ARRAY = "slurm array"
# waiting: not started. killed: its status says that it runs, but nobody runs it.
STATES = ("waiting", "running", "finished", "failed", "stopped", "killed")


@dataclass
class SweepJob:
    """``overrides``: the words that make this job of the sweep's configuration. ``error``: the first line of why it failed.
    ``seconds``: wall time as the sweep saw it, else of its steps. ``cluster_id``: of the batch job or process that runs it."""

    number: int
    overrides: list[str]
    state: str = "waiting"
    objective: float | None = None
    step: int | None = None
    seconds: float | None = None
    folder: str = ""
    error: str | None = None
    cluster_id: str | None = None

    def __post_init__(self) -> None:
        self.folder = self.folder or str(self.number)


@dataclass
class Plan:
    """What was asked for. ``command``: the words behind ``python train.py``, given in ``directory``; ``keys``: what is swept;
    ``trials``: jobs that a study shall have, None where the words say which jobs there are."""

    command: list[str]
    directory: str
    launcher: str
    sweeper: str
    keys: list[str]
    metric: str | None = None
    direction: str | None = None
    trials: int | None = None


@dataclass
class Sweep:
    """A sweep in ``path``; ``state`` of its process: running, finished, failed (a job has), stopped, or killed."""

    path: Path
    plan: Plan
    jobs: dict[int, SweepJob] = field(default_factory=dict)
    state: str = "running"

    def folder(self, number: int) -> RunFolder:
        return RunFolder(self.path / str(number))

    def lock(self) -> RunLock:
        """Of the process that starts jobs here."""
        return RunLock(self.path / "sweep.lock")

    # --- reading and writing ------------------------------------------------------------------------------------------

    @classmethod
    def load(cls, path: Path) -> Sweep:
        """Raises UserError, naming the nearest folder of a sweep, where ``path`` is none."""
        file = path / SWEEP
        if not file.is_file():
            raise UserError(f"{path} is not the folder of a sweep (it has no {SWEEP}){_nearest(path)}")
        try:
            stored = json.loads(file.read_text(encoding="utf-8"))
            if stored["format"] != FORMAT:
                raise UserError(f"{file} has format {stored['format']}; this version of twinkle_research reads {FORMAT}")
            names = {f.name for f in fields(Plan)}
            plan = Plan(**{name: value for name, value in stored.items() if name in names})
            jobs = {job["number"]: SweepJob(**job) for job in stored["jobs"]}
            return cls(path, plan, jobs, stored["state"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{file} cannot be read: {error}") from error

    def save(self) -> None:
        """Replaces sweep.json; readers see the old or the new one."""
        write_atomic(self.path / SWEEP, (json.dumps(self.as_dict(), indent=1, allow_nan=False) + "\n").encode())

    def as_dict(self) -> dict[str, Any]:
        now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        jobs = [asdict(self.jobs[number]) for number in sorted(self.jobs)]
        return {"format": FORMAT, "state": self.state, **asdict(self.plan), "time": now, "jobs": jobs}

    def refresh(self) -> None:
        """Takes over what the run folders say."""
        for job in self.jobs.values():
            self.look_at(job)
        states = {job.state for job in self.jobs.values()}
        if self.is_complete():
            self.state = "finished"
        elif self.plan.launcher == ARRAY:
            self.state = "failed" if states <= {"finished", "failed"} else "running"
        elif self.state in ("running", "finished") and not is_held(self.path / "sweep.lock"):
            self.state = "killed"

    def look_at(self, job: SweepJob) -> None:
        folder = self.folder(job.number)
        status = folder.read_status()
        if status.get("state") not in STATES:
            if job.state == "running" and job.cluster_id is None and not is_held(self.path / "sweep.lock"):
                job.state = "killed"
            return
        job.state = status["state"]
        if job.state == "running" and not is_held(folder.lock.path):
            job.state = "killed"
        job.step = status.get("step")
        job.objective = number_of(status.get("objective"))
        job.error = one_line(status.get("message")) if job.state in ("failed", "stopped") else None
        if job.seconds is None and job.state not in ("running", "killed"):
            job.seconds = round(sum(row.get("step_seconds") or 0.0 for row in read_rows(folder.path / TIMING)), 3) or None

    # --- what it says -------------------------------------------------------------------------------------------------

    def ranked(self) -> list[SweepJob]:
        """Finished jobs with an objective, the best first; equal ones by number."""
        sign = -1 if self.plan.direction == "maximize" else 1
        found = [job for job in self.jobs.values() if job.state == "finished" and job.objective is not None]
        return sorted(found, key=lambda job: (sign * job.objective, job.number)) if self.plan.metric else []

    def unfinished(self) -> list[SweepJob]:
        return [self.jobs[number] for number in sorted(self.jobs) if self.jobs[number].state != "finished"]

    def is_complete(self) -> bool:
        return not self.unfinished() and len(self.jobs) >= (self.plan.trials or 1)

    def counts(self) -> dict[str, int]:
        found = {state: sum(job.state == state for job in self.jobs.values()) for state in STATES}
        found["waiting"] += max(0, (self.plan.trials or 0) - len(self.jobs))
        return {state: count for state, count in found.items() if count}


def number_of(value: Any) -> float | None:
    """A finite number; None for anything else: what cannot be compared is no objective."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def one_line(text: Any) -> str | None:
    lines = str(text or "").strip().splitlines()
    return lines[0][:300] if lines else None


def _nearest(path: Path) -> str:
    """Hint: a sweep inside (the newest) or beside it, or the one that a run folder belongs to."""
    if (path.parent / SWEEP).is_file():
        return f"; it is a job of {path.parent}"
    inside = sorted(path.glob(f"*/{SWEEP}"), key=lambda file: file.stat().st_mtime)
    if inside:
        return f"; the newest sweep in it is {inside[-1].parent}"
    beside = [p.parent.name for p in path.parent.glob(f"*/{SWEEP}")] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, beside, n=1)
    return f"; did you mean {path.parent / close[0]}?" if close else "" if path.exists() else "; there is no such folder"
