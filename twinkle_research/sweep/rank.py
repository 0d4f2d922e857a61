"""One task of a batch job, called by submitit: it runs one rank of the run as a child process and passes signals on.

The run itself never lives in submitit's process: its ranks end by exit codes, and submitit's own handlers would replace those
that make all ranks save at the same step. Only what is pickled for the job, and what its processes need, is imported here.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from types import FrameType
from typing import Any

from twinkle_research.errors import EXIT_STOPPED
from twinkle_research.sweep.job import LOG

# After SIGTERM the cluster ends the job; one that ended by itself before would not be brought back.
KILL_SECONDS = 120.0
_POLL_SECONDS = 0.1


class RankFailed(Exception):
    """Makes the batch job a failed one."""


class RankOfJob:
    """``command``: runs a job of a sweep, whose run folder is ``folder``."""

    def __init__(self, command: list[str], folder: str) -> None:
        self.command = command
        self.folder = folder
        self._pid: int | None = None
        self._told: set[int] = set()

    def __call__(self) -> int:
        for number in (signal.SIGTERM, signal.SIGUSR1):  # the child has them from the cluster too
            signal.signal(number, self._note)
        rank = int(os.environ.get("SLURM_PROCID", "0"))
        # submitit's own signal is not for the child, which would die of it.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
        with (Path(self.folder) / LOG).open("ab") as log:
            output = log if rank == 0 else None
            child = subprocess.Popen(self.command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        self._pid = child.pid
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR2])
        while not self._has_ended():
            time.sleep(_POLL_SECONDS)
        code = child.wait()
        if code == EXIT_STOPPED and signal.SIGTERM in self._told:
            time.sleep(KILL_SECONDS)
        elif code == EXIT_STOPPED and rank == 0:
            os.kill(os.getpid(), signal.SIGUSR2)  # submitit queues the job again, and does not come back from it
            time.sleep(KILL_SECONDS)
        if code not in (0, EXIT_STOPPED):
            raise RankFailed(f"exit code {code}: see {self.folder}")
        return code

    def checkpoint(self) -> Any:
        """Called by submitit on its signal, in rank 0: all ranks save at the same step and leave. Then it requeues the job."""
        from submitit.helpers import DelayedSubmission

        if not self._has_ended():
            os.kill(self._pid, signal.SIGUSR1)
            while not self._has_ended():
                time.sleep(_POLL_SECONDS)
        return DelayedSubmission(RankOfJob(self.command, self.folder))

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._told.add(number)

    def _has_ended(self) -> bool:
        """Looks without reaping, so that a signal handler may ask at any moment."""
        if self._pid is None:
            return True
        return os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
