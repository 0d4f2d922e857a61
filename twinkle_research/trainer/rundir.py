"""The run folder: the names in it, its status, and whether a command starts, continues or finds a finished run."""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinkle_research.errors import CheckpointError, ConfigError, UserError
from twinkle_research.trainer.runlock import RunLock

if TYPE_CHECKING:
    from twinkle_research.trainer.config import TrainConfig

STATES = ("running", "finished", "failed", "stopped")


class RunFolder:
    """Names and small files of one run folder.

    ``eval_only``: what an evaluation records about itself (config, status, lock, logs) lies in ``eval_only/``, so
    that it changes nothing of the run that it measures and may run beside it.
    """

    def __init__(self, path: str | Path, eval_only: bool = False) -> None:
        self.path = Path(path)
        self.own = self.path / "eval_only" if eval_only else self.path
        self.config = self.own / "config.yaml"
        self.status = self.own / "status.json"
        self.lock = RunLock(self.own / "run.lock")
        self.train_log = self.own / "train.log"
        self.logs = self.own / "logs"
        self.error = self.logs / "error.json"
        self.metrics = self.path / "metrics.jsonl"
        self.timing = self.path / "timing.jsonl"
        self.samples = self.path / "samples.jsonl"
        self.report = self.path / "report.html"
        self.checkpoints = self.path / "checkpoints"
        self.latest = self.checkpoints / "latest"
        self.wandb = self.path / "wandb"
        self.tensorboard = self.path / "tensorboard"

    def __str__(self) -> str:
        return str(self.path)

    def rank_log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank}.log"

    def create(self) -> None:
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot write to run_dir={self.path}: {error.strerror} ({error.filename})") from error

    def write_json(self, name: str, value: Any) -> None:
        """Writes ``name`` in the run folder; readers see the old file or the whole new one."""
        write_json(self.path / name, value)

    # --- status.json ------------------------------------------------------------------------------------------------

    def read_status(self) -> dict[str, Any]:
        """{} while there is none. An unreadable file counts as none: it says nothing that the run depends on."""
        try:
            status = json.loads(self.status.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return {}
        return status if isinstance(status, dict) else {}

    def write_status(self, state: str, **fields: Any) -> None:
        """Replaces status.json. ``step`` is that of the last row of metrics.jsonl where it is not given."""
        if state not in STATES:
            raise ValueError(f"state {state!r} is none of {', '.join(STATES)}")
        now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        write_json(self.status, {"state": state, "step": self.last_step()} | fields | {"time": now})

    def last_step(self) -> int:
        """The last optimizer step that metrics.jsonl knows of (0: none)."""
        if not self.metrics.is_file():
            return 0
        with self.metrics.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 65536))
            complete = file.read().split(b"\n")[:-1]
        return int(json.loads(complete[-1])["step"]) if complete else 0

    # --- the first error of an attempt ------------------------------------------------------------------------------

    def claim_error(self, record: dict[str, Any]) -> bool:
        """Writes ``logs/error.json`` unless another rank already has. True for the one that did."""
        try:
            with self.error.open("x", encoding="utf-8") as file:
                json.dump(record, file, indent=1)
        except FileExistsError:
            return False
        return True

    def read_error(self) -> dict[str, Any] | None:
        """The first error of this attempt; None while there is none (or its writer was killed writing it)."""
        try:
            return json.loads(self.error.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return None


def write_json(path: Path, value: Any) -> None:
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    partial.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)


# --- which folder --------------------------------------------------------------------------------------------------


def new_run_dir(loss: str, model: str, job_key: str | None = None, root: str | Path = "runs") -> Path:
    """A folder for a run without ``run_dir``: ``runs/<time>-<loss>-<model>-<random>``, made here, so it is nobody else's.

    ``job_key`` (of torchrun or Slurm) names a folder that all attempts of that job share.
    """
    if job_key is not None:
        return Path(root) / f"{job_key}-{loss}-{model}"
    while True:
        path = Path(root) / f"{time.strftime('%Y%m%d-%H%M%S')}-{loss}-{model}-{secrets.token_hex(2)}"
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise UserError(f"cannot make {path}: {error.strerror}; give a run_dir") from error
        return path


def agent_key() -> str | None:
    """Names the torchrun agent that is our parent: the same for all its restarts. None where /proc does not tell."""
    parent = Path(f"/proc/{os.getppid()}/stat")
    if not parent.is_file():
        return None
    started = parent.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]
    return f"torchrun-{socket.gethostname()}-{os.getppid()}-{started}"


# --- start, continue or finished -------------------------------------------------------------------------------------


def open_run(folder: RunFolder, cfg: TrainConfig) -> bool:
    """Locks ``folder`` for this process and writes ``config.yaml``. False when its run is finished: nothing to do.

    A folder that holds a run is continued if the settings that differ may change (config.resume), else refused; the
    stored config stays as it is until then. Raises ConfigError, CheckpointError or, for a live writer, UserError.
    """
    from twinkle_research.config.resume import check_resume
    from twinkle_research.config.storage import load_config, save_config

    existed = folder.config.is_file()
    if existed and cfg.resume == "never" and not cfg.eval_only:
        raise ConfigError(f"run_dir={folder} holds a run, and resume=never: give a new run_dir, or resume=auto to continue it")
    if not existed and not cfg.eval_only and any(folder.checkpoints.glob("step-*")):
        raise CheckpointError(
            f"{folder} has checkpoints but no config.yaml: it is not whole. Put the file back or give a new run_dir"
        )
    folder.create()
    folder.lock.acquire()
    try:
        if folder.config.is_file() and not cfg.eval_only:
            old = load_config(folder.own)
            check_resume(old, cfg)
            if is_finished(folder, old, cfg):
                folder.lock.release()
                return False
        folder.error.unlink(missing_ok=True)
        save_config(cfg, folder.own)
        folder.write_status("running", host=socket.gethostname(), pid=os.getpid())
    except BaseException:
        folder.lock.release()
        raise
    return True


def is_finished(folder: RunFolder, old: TrainConfig, new: TrainConfig) -> bool:
    """Whether the run reached its end and the new settings do not ask for more."""
    limits = [(c.trainer.max_steps, c.trainer.epochs) for c in (old, new)]
    return folder.read_status().get("state") == "finished" and limits[0] == limits[1]
