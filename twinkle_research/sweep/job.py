"""One job of a sweep as a process of its own: ``python -m twinkle_research.sweep.job <sweep>/<number>``.

Its configuration was composed and checked when the sweep started it (``job.yaml``). Started by srun, it joins the other ranks.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import traceback
from pathlib import Path

from omegaconf import DictConfig

from twinkle_research.config.storage import load_config, save_config
from twinkle_research.distributed.env import detect
from twinkle_research.distributed.failures import error_record, leave_word, user_text
from twinkle_research.errors import UserError
from twinkle_research.tracking.config import WandbMode
from twinkle_research.trainer.config import TrainConfig
from twinkle_research.trainer.rundir import RunFolder
from twinkle_research.trainer.worker import die_with_parent

CONFIG = "job.yaml"
LOG = "job.log"  # what the job prints


def job_command(folder: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "twinkle_research.sweep.job", str(folder), *options]


def package_path() -> str:
    """A PYTHONPATH with which the job finds this package, also where it is run from a checkout that is not installed."""
    return os.pathsep.join([str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])


def write_job(config: TrainConfig) -> None:
    save_config(config, config.run_dir, CONFIG)


def join_group(cfg: DictConfig, sweep: str) -> None:
    """W&B shows the jobs of a sweep as one group."""
    if cfg.tracking.wandb.group is None and cfg.tracking.wandb.mode is not WandbMode.disabled:
        cfg.tracking.wandb.group = sweep


def record_failure(folder: RunFolder, error: BaseException) -> None:
    """The account of a job that did not come so far that its run could give one; a run that another process has open, or
    that has finished, keeps its own."""
    record = error_record(error, 0)
    folder.create()
    try:
        folder.lock.acquire()
    except UserError:
        return
    if folder.read_status().get("state") != "finished":
        folder.write_status("failed", **{key: record[key] for key in ("message", "type", "rank", "traceback")})
    folder.lock.release()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m twinkle_research.sweep.job", description=main.__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--parent-fd", type=int, help="a pipe that ends when the sweep's process does")
    parser.add_argument("--cores", help="CPU cores that this job has, by number")
    options = parser.parse_args(arguments)
    if options.parent_fd is not None:  # what a killed sweep started must not keep its folders from the resumed one
        os.set_inheritable(options.parent_fd, False)
        threading.Thread(target=die_with_parent, args=(options.parent_fd,), name="sweep", daemon=True).start()
    if options.cores:
        os.sched_setaffinity(0, {int(core) for core in options.cores.split(",")})
    return run(options.folder)


def run(path: Path) -> int:
    """Runs the job and returns the exit code (twinkle_research.errors)."""
    from twinkle_research.config.plan import print_plan, run_plan
    from twinkle_research.distributed.launcher import start

    world = detect()
    try:
        config = load_config(path / CONFIG)
        plan = run_plan(config, world)
        if world.rank == 0:
            print_plan(plan, config)
        return start(config, plan)
    except Exception as error:  # whatever it is, it must be on record
        if world.rank == 0:
            traceback.print_exc()
            record_failure(RunFolder(path), error)
        if isinstance(error, UserError):
            leave_word(error)
        if isinstance(error, UserError) and world.rank != 0:
            print(user_text(error, error.exit_code), file=sys.stderr)
        return error.exit_code if isinstance(error, UserError) else 1


if __name__ == "__main__":
    sys.exit(main())
