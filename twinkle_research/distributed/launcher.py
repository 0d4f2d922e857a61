"""Starts a run: in this process, in workers of our own, or as one rank of torchrun or srun.

The process that starts workers never imports torch: it locks the run folder, watches the workers and passes signals on.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from twinkle_research.distributed.env import RUN_DIR_VARIABLE, WorldInfo, detect, let_idle_threads_sleep
from twinkle_research.distributed.failures import death_record, user_text
from twinkle_research.distributed.signals import StopSignals, blocked
from twinkle_research.errors import EXIT_INTERRUPTED, EXIT_STOPPED, UserError
from twinkle_research.trainer.rundir import RunFolder, new_run_dir, open_run
from twinkle_research.trainer.worker import ENTRY, finished_text, join, report_failure, run_rank

if TYPE_CHECKING:
    from twinkle_research.config.plan import RunPlan
    from twinkle_research.trainer.config import TrainConfig

# After the first failure the other workers may write down and close what they have.
GRACE_SECONDS = 8.0
_POLL_SECONDS = 0.05


def start(cfg: TrainConfig, plan: RunPlan, run_dir: str | Path | None = None, in_process: bool = True, entry: str = ENTRY) -> int:
    """Runs ``cfg`` to its end and returns the exit code; errors for the user are printed here.

    run_dir: overrides ``cfg.run_dir``; neither given, a new folder under runs/. in_process=False: a single process is
    a child too (jobs of a sweep). The outcome (state, step, objective) is in ``<run_dir>/status.json``.

    Exit codes: 0 done, 1 failure, 2 configuration, 75 stopped by a signal and saved, 130 left on a second signal.
    """
    let_idle_threads_sleep()
    try:
        world = detect()
        if run_dir is not None:
            cfg.run_dir = str(run_dir)
        if world.joins:
            join(cfg, world, entry)
        return start_here(cfg, plan.nproc_per_node, in_process, entry)
    except UserError as error:
        print(user_text(error, error.exit_code), file=sys.stderr, flush=True)
        return error.exit_code


def start_here(cfg: TrainConfig, nproc: int, in_process: bool, entry: str) -> int:
    cfg.run_dir = str(cfg.run_dir or new_run_dir(cfg.loss.name, cfg.model.name))
    folder = RunFolder(cfg.run_dir, cfg.eval_only)
    alone = nproc == 1 and in_process
    with StopSignals(leave_on_second=alone, on_second=lambda: record_interrupt(folder)) as stop:
        with stop.leaving_on_first():
            if not open_run(folder, cfg):
                print(finished_text(folder))
                return 0
        try:
            return run_rank(folder, WorldInfo("plain"), stop, entry) if alone else run_workers(folder, nproc, stop, entry)
        finally:
            folder.lock.release()


def record_interrupt(folder: RunFolder) -> None:
    folder.write_status("stopped", message="left on a second signal; the last checkpoint stands")


# --- workers ---------------------------------------------------------------------------------------------------------


@dataclass
class Worker:
    rank: int
    process: subprocess.Popen[bytes]
    killed: bool = False  # by us

    @property
    def code(self) -> int | None:
        return self.process.poll()

    def send(self, number: int) -> None:
        if self.code is None:
            self.process.send_signal(number)

    def kill(self) -> None:
        """Ends the worker and the helpers that it forked, which are in its process group."""
        if self.code is None:
            self.killed = True
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def run_workers(folder: RunFolder, nproc: int, stop: StopSignals, entry: str) -> int:
    """Starts ``nproc`` ranks on this machine, waits for their end and records a failure."""
    # The workers hold the reading end: it ends when this process does, however that happens.
    parent_read, parent_write = os.pipe()
    with socket.create_server(("127.0.0.1", 0)) as listener, blocked():
        workers = [start_worker(folder, rank, nproc, listener, parent_read, entry) for rank in range(nproc)]
    os.close(parent_read)
    try:
        interrupted = watch(folder, workers, stop)
    finally:
        for worker in workers:
            worker.kill()
        os.close(parent_write)
    if interrupted:
        record_interrupt(folder)
        return EXIT_INTERRUPTED
    if all(worker.code in (0, EXIT_STOPPED) for worker in workers):
        return max(worker.code for worker in workers)
    record = choose_failure(folder, workers)
    report_failure(folder, record, nproc)
    return record["exit_code"]


def start_worker(folder: RunFolder, rank: int, nproc: int, listener: socket.socket, parent_fd: int, entry: str) -> Worker:
    """Rank 0 keeps the terminal; the others write into their log. All have their own session: Ctrl-C is ours to pass on."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": nproc, "LOCAL_WORLD_SIZE": nproc, "MASTER_ADDR": "127.0.0.1"}
    place |= {"MASTER_PORT": listener.getsockname()[1], RUN_DIR_VARIABLE: folder.path}
    environ = os.environ | {name: str(value) for name, value in place.items()}
    # Found also from another folder, when train.py is run from a checkout that is not installed.
    package = str(Path(__file__).resolve().parents[2])
    environ["PYTHONPATH"] = os.pathsep.join([package, *filter(None, [environ.get("PYTHONPATH")])])
    if Path("/sys/class/net/lo").exists():  # the ranks are all here; do not depend on what the host name resolves to
        environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    command = [sys.executable, "-m", "twinkle_research.trainer.worker", "--entry", entry]
    command += ["--parent-fd", str(parent_fd), "--lock-fd", str(folder.lock.fd)]
    fds = [parent_fd, folder.lock.fd]
    if folder.own != folder.path:
        command.append("--eval-only")
    if rank == 0:
        command += ["--listen-fd", str(listener.fileno())]
        fds.append(listener.fileno())
        output = None
    else:
        output = folder.rank_log(rank).open("ab")
    process = subprocess.Popen(
        command, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=fds, start_new_session=True
    )
    if output is not None:
        output.close()
    return Worker(rank, process)


def watch(folder: RunFolder, workers: list[Worker], stop: StopSignals) -> bool:
    """Until all workers are gone. True when a second signal ended them at once."""
    forwarded = False
    failed_at: float | None = None
    while any(worker.code is None for worker in workers):
        if stop.count >= 2:
            return True
        if stop.requested and not forwarded:
            forwarded = True
            for worker in workers:
                worker.send(stop.last)
        if failed_at is None and (failed := [w for w in workers if w.code not in (None, 0, EXIT_STOPPED)]):
            failed_at = time.monotonic()
            if failed[0].code < 0 and failed[0].code != -signal.SIGABRT:  # its peers need not wait for its account
                folder.claim_error(death_record(failed[0].rank, failed[0].code, folder.rank_log(failed[0].rank)))
        if failed_at is not None and time.monotonic() - failed_at > GRACE_SECONDS:
            return False
        time.sleep(_POLL_SECONDS)
    return False


def choose_failure(folder: RunFolder, workers: list[Worker]) -> dict:
    """The account of the rank that failed first. A rank that was killed left none, and its peers only saw it vanish."""
    record = folder.read_error()
    if record is not None and not record["peer"]:
        return record
    deaths = [w for w in workers if w.code not in (0, EXIT_STOPPED) and not w.killed]
    # Libraries abort a process whose peer is gone, so an abort is the least likely origin among signals.
    killed = sorted((w for w in deaths if w.code < 0), key=lambda w: w.code == -signal.SIGABRT)
    if killed or record is None:
        first = (killed or deaths)[0]
        return death_record(first.rank, first.code, folder.rank_log(first.rank))
    return record
