"""Forked children for tests: they have everything imported already, and can be killed at any moment."""

import os
import resource
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path


def fork(action: Callable[[], object]) -> int:
    """Starts ``action`` in a child and returns its pid; the child ends with 0, with what ``action`` gave to sys.exit, or
    with 1 where it raised."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        action()
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait(pid: int) -> int:
    """The exit code; the negative signal number if one ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.005)


def children_of(pid: int) -> list[int]:
    return [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]


def is_running(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def peak_growth_mib(action: Callable[[], object], result: Path) -> float:
    """By how much the resident memory of a child that runs ``action`` exceeds what it started with, at its peak."""

    def measured() -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        action()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        result.write_text(str((peak - pages * os.sysconf("SC_PAGE_SIZE")) / 2**20))

    assert wait(fork(measured)) == 0
    return float(result.read_text())
