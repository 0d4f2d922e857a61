"""One rank of a run, from the stored config to the exit code.

Three ways lead here: in the process of ``python train.py`` itself (one rank), as a child of our launcher
(``python -m twinkle_research.trainer.worker``), and as a rank that torchrun or srun started.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import os
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from twinkle_research.config.storage import load_config
from twinkle_research.distributed.env import RUN_DIR_VARIABLE, WorldInfo, detect
from twinkle_research.distributed.failures import error_record, failure_text, user_text
from twinkle_research.distributed.signals import LAUNCHER_ECHO_SECONDS, StopSignals
from twinkle_research.errors import EXIT_STOPPED, Stopped, UserError
from twinkle_research.trainer.ranklog import RankLog
from twinkle_research.trainer.rundir import RunFolder, agent_key, new_run_dir, open_run

if TYPE_CHECKING:
    from twinkle_research.distributed.runtime import Runtime
    from twinkle_research.trainer.config import TrainConfig

# ``run(cfg, runtime, folder) -> {"step": ..., "objective": ...}``
ENTRY = "twinkle_research.trainer.run:run"

# A rank that lost its peer waits so long for the account of the one that failed, before it gives its own.
_ECHO_WAIT_SECONDS = 3.0
# How long the files of rank 0 may take to be visible on another host of a shared file system.
_VISIBLE_SECONDS = 60.0


def run_rank(
    folder: RunFolder,
    world: WorldInfo,
    stop: StopSignals,
    entry: str = ENTRY,
    runtime: Runtime | None = None,
    listen_fd: int | None = None,
) -> int:
    """Runs ``entry`` on this rank and returns the exit code. Nothing escapes: errors are recorded in the run folder.

    Rank 0 records the end of a run that finished or was stopped; whoever started the ranks records a failure
    (report_failure), since only it knows of a rank that was killed.
    """
    with RankLog(folder, world.rank) as log:
        try:
            cfg = load_config(folder.own)
            cfg.run_dir = str(folder.path)
            if runtime is None:
                from twinkle_research.distributed.runtime import Runtime

                runtime = Runtime.start(cfg.launch, cfg.backend.device, world, stop, listen_fd)
            return run_and_record(cfg, runtime, folder, stop, entry)
        except BaseException as error:  # the last frame of the process: whatever it is, it must be on record
            return record_failure(folder, error, world, log)


def run_and_record(cfg: TrainConfig, runtime: Runtime, folder: RunFolder, stop: StopSignals, entry: str) -> int:
    try:
        result = entry_point(entry)(cfg, runtime, folder)
        state, fields, code = "finished", {key: result[key] for key in ("step", "objective") if key in result}, 0
    except Stopped as stopped:
        state, fields, code = "stopped", {"message": str(stopped)}, EXIT_STOPPED
    runtime.barrier()  # no rank leaves, and is seen to leave, before rank 0 has saved everything
    stop.ignore()
    if runtime.is_main:
        folder.write_status(state, **fields)
        if code == EXIT_STOPPED:
            print(f"{fields['message']}. To continue: the same command with run_dir={folder.path}", file=sys.stderr)
    runtime.close()
    return code


def record_failure(folder: RunFolder, error: BaseException, world: WorldInfo, log: RankLog) -> int:
    """Writes the traceback into this rank's log, and the account of the run's failure unless another rank was first."""
    record = error_record(error, world.rank)
    log.keep(record["traceback"])
    deadline = time.monotonic() + (_ECHO_WAIT_SECONDS if record["peer"] and world.world_size > 1 else 0.0)
    while time.monotonic() < deadline and folder.read_error() is None:
        time.sleep(0.05)
    first = folder.claim_error(record)
    if first and world.kind != "worker":  # our launcher shows it itself, when it knows how all its workers ended
        report_failure(folder, record, world.world_size, log)
    return record["exit_code"]


def report_failure(folder: RunFolder, record: dict[str, Any], world_size: int, log: RankLog | None = None) -> None:
    """status.json and the screen."""
    folder.write_status("failed", **{key: record[key] for key in ("message", "type", "rank", "traceback")})
    text = failure_text(record, folder.rank_log(record["rank"]), world_size)
    if log is None:
        print(text, file=sys.stderr, flush=True)
        with folder.train_log.open("a", encoding="utf-8") as file:
            file.write(text + "\n")
    else:
        log.show(text)


def entry_point(name: str) -> Any:
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)


def leave(code: int) -> NoReturn:
    """Ends this rank now. After a failure the interpreter's own end may wait for threads and peers that are gone."""
    if code not in (0, EXIT_STOPPED):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


# --- started by our launcher -----------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> None:
    """A worker of distributed/launcher.py, which gives the place in the environment and open files by number."""
    parser = argparse.ArgumentParser(prog="python -m twinkle_research.trainer.worker", description=main.__doc__)
    parser.add_argument("--entry", default=ENTRY)
    parser.add_argument("--eval-only", action="store_true")
    parser.add_argument("--parent-fd", type=int, required=True, help="a pipe that ends when the launcher does")
    parser.add_argument("--lock-fd", type=int, required=True, help="shares the launcher's lock of the run folder")
    parser.add_argument("--listen-fd", type=int, help="rank 0: the listening socket of the rendezvous")
    options = parser.parse_args(arguments)
    stop = StopSignals(echo_seconds=LAUNCHER_ECHO_SECONDS, leave_on_second=False)
    stop.install()
    for fd in (options.parent_fd, options.lock_fd):
        os.set_inheritable(fd, False)
        os.register_at_fork(after_in_child=lambda fd=fd: os.close(fd))
    threading.Thread(target=die_with_parent, args=(options.parent_fd,), name="parent", daemon=True).start()
    folder = RunFolder(os.environ[RUN_DIR_VARIABLE], options.eval_only)
    leave(run_rank(folder, detect(), stop, options.entry, listen_fd=options.listen_fd))


def die_with_parent(fd: int) -> None:
    """A launcher that was killed must not leave workers behind that write to a folder whose lock is free."""
    os.read(fd, 1)
    os._exit(1)


# --- started by torchrun or srun -------------------------------------------------------------------------------------


def join(cfg: TrainConfig, world: WorldInfo, entry: str = ENTRY) -> NoReturn:
    """Joins the other ranks; the config and the folder of rank 0 count for all. Ends the process."""
    from twinkle_research.distributed.runtime import Runtime

    # Never restored: srun terminates the ranks that are still on their way out when the first one has left with 75.
    stop = StopSignals(echo_seconds=LAUNCHER_ECHO_SECONDS)
    stop.install()
    runtime = Runtime.start(cfg.launch, cfg.backend.device, world, stop)
    folder, code = agree_on_folder(cfg, runtime, world)
    if folder is None:
        runtime.barrier()
        runtime.close()
        sys.exit(code)
    code = run_rank(folder, world, stop, entry, runtime=runtime)
    folder.lock.release()
    leave(code)


def agree_on_folder(cfg: TrainConfig, runtime: Runtime, world: WorldInfo) -> tuple[RunFolder | None, int]:
    """Rank 0 opens the run folder and tells the others; (None, exit code) when there is nothing to run."""
    answer: dict[str, Any] = {}
    folder: RunFolder | None = None
    if runtime.is_main:
        try:
            key = world.job_key or (agent_key() if world.kind == "torchrun" else None)
            cfg.run_dir = str(cfg.run_dir or new_run_dir(cfg.loss.name, cfg.model.name, key))
            folder = RunFolder(cfg.run_dir, cfg.eval_only)
            if open_run(folder, cfg):
                answer = {"run_dir": cfg.run_dir, "config": digest(folder.config), "eval_only": cfg.eval_only}
            else:
                print(finished_text(folder))
                answer = {"exit_code": 0}
        except UserError as error:
            print(user_text(error, error.exit_code), file=sys.stderr, flush=True)
            answer = {"exit_code": error.exit_code}
        except Exception:  # the others wait for an answer, whatever happens here
            traceback.print_exc()
            answer = {"exit_code": 1}
    answer = runtime.broadcast_object(answer)
    if "exit_code" in answer:
        return None, answer["exit_code"]
    if folder is None:
        folder = RunFolder(answer["run_dir"], answer["eval_only"])
    missing = [text for text in runtime.gather_objects(wait_for_config(folder, answer["config"], runtime.rank)) if text]
    if missing:
        if runtime.is_main:
            report_failure(folder, error_record(UserError(missing[0]), 0), runtime.world_size)
            folder.lock.release()
        return None, 1
    return folder, 0


def wait_for_config(folder: RunFolder, expected: str, rank: int) -> str:
    """Empty when this rank sees the config that rank 0 wrote; else what is wrong."""
    deadline = time.monotonic() + _VISIBLE_SECONDS
    while time.monotonic() < deadline:
        if folder.config.is_file() and digest(folder.config) == expected:
            return ""
        time.sleep(0.2)
    return (
        f"rank {rank} on host {socket.gethostname()} does not see {folder.config.absolute()} that rank 0 wrote: "
        "run_dir must lie on a file system that all nodes share"
    )


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def finished_text(folder: RunFolder) -> str:
    step = folder.read_status().get("step")
    return f"{folder}: this run is finished (step {step}). To go on, raise trainer.max_steps or trainer.epochs."


if __name__ == "__main__":
    main()
