"""``run.lock``: one live writer for a run folder.

The file says who holds it (host, pid, process start time, boot, job) and carries a ``flock``. Neither alone is enough:
a flock may be local to one host or missing on a shared file system and may outlive a crashed client of it; a pid says
nothing on another host. So:

* holder on this machine: it lives if its pid has the recorded start time (pids are reused) and is no zombie;
* holder elsewhere: an earlier attempt of our own requeued job is dead; otherwise the holder's heartbeat (it touches
  the file every few seconds) decides.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from twinkle_research.distributed.env import job_identity
from twinkle_research.errors import UserError

HEARTBEAT_SECONDS = 10.0
STALE_SECONDS = 60.0
# The workers of a launcher that was killed die in a moment; they share its flock until then.
LINGER_SECONDS = 10.0
# A process that was just killed may be seen alive for a moment.
DYING_SECONDS = 1.0


class RunLock:
    """The lock of one run folder. Held from ``acquire`` to ``release`` or to the death of the process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd = -1
        self._token = ""
        self._flock = ""  # "ours", "other's" or "unsupported"
        self._stop = threading.Event()
        self._heart = threading.Thread()

    # --- taking and giving back -------------------------------------------------------------------------------------

    def acquire(self) -> None:
        """Takes the lock, also from a dead holder. UserError names a live one."""
        started, told = time.monotonic(), False
        while True:
            self._open()
            holder = read_holder(self.fd)
            verdict = self._verdict(holder, time.monotonic() - started)
            if verdict == "free":
                break
            if verdict == "stuck":  # the flock of a dead client of a shared file system: leave that file behind
                self._replace()
                break
            self._close()
            if verdict == "live":
                raise UserError(
                    f"another process writes to {self.path.parent}: {describe(holder)}. "
                    "Stop it, wait for it to end, or give another run_dir."
                )
            elsewhere = holder is not None and not same_machine(holder)
            if elsewhere and not told:
                told = True
                sys.stderr.write(f"{self.path}: {describe(holder)}; up to {STALE_SECONDS:.0f} s to see whether it lives\n")
            time.sleep(1.0 if elsewhere else 0.1)
        self._write(holder)
        os.register_at_fork(after_in_child=self._close)  # helpers that we fork must not keep the flock alive
        self._stop.clear()
        self._heart = threading.Thread(target=self._beat, name="run-lock", daemon=True)
        self._heart.start()

    def release(self) -> None:
        """Gives the lock back. The file stays, empty: removing it could remove the lock of the next holder."""
        if self.fd < 0:
            return
        self._stop.set()
        self._heart.join()
        if self._is_ours():
            os.ftruncate(self.fd, 0)
        self._close()

    # --- parts ------------------------------------------------------------------------------------------------------

    def _open(self) -> None:
        """Opens the file that the path names now and tries to get its flock."""
        while True:
            self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            self._flock = try_flock(self.fd)
            if self._is_current():
                return
            self._close()

    def _verdict(self, holder: dict[str, Any] | None, waited: float) -> str:
        """free, live, stuck, or wait (not known yet)."""
        free = self._flock != "other's"
        lingering = "wait" if waited < LINGER_SECONDS else "live"
        if holder is None:  # released, new, or somebody with the flock is about to write who it is
            return "free" if free else lingering
        if same_machine(holder):
            if process_lives(holder):
                return "live" if waited > DYING_SECONDS else "wait"
            return "free" if free else lingering
        if earlier_attempt(holder):
            return "free" if free else "stuck"
        age = self._age()
        if age > STALE_SECONDS:
            return "free" if free else "stuck"
        # A heartbeat since we began to look proves life; a fresh crash needs time to become stale.
        return "live" if age < waited - 0.5 else "wait"

    def _age(self) -> float:
        """Seconds since the last heartbeat on the file server's clock, which needs no agreement between hosts."""
        probe = self.path.with_name(f"{self.path.name}.{secrets.token_hex(4)}")
        probe.touch()
        now = probe.stat().st_mtime
        probe.unlink()
        return now - os.fstat(self.fd).st_mtime

    def _replace(self) -> None:
        fresh = self.path.with_name(f"{self.path.name}.{secrets.token_hex(4)}")
        self._close()
        self.fd = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        self._flock = try_flock(self.fd)
        os.replace(fresh, self.path)

    def _write(self, previous: dict[str, Any] | None) -> None:
        self._token = secrets.token_hex(8)
        text = json.dumps(own_record() | {"token": self._token}, indent=1)
        os.ftruncate(self.fd, 0)
        os.pwrite(self.fd, text.encode(), 0)
        os.fsync(self.fd)
        if self._flock == "ours" and (previous is None or same_machine(previous)):
            return
        # Without a flock that all contenders see, two may have come this far: the last writer wins.
        time.sleep(1.0)
        if not self._is_ours():
            self._close()
            raise UserError(f"another process took {self.path} at the same moment. Start again if it should be this one.")

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT_SECONDS):
            if not self._is_ours():
                sys.stderr.write(f"error: {self.path} was removed or taken over by another process: leaving at once\n")
                sys.stderr.flush()
                os._exit(1)
            os.utime(self.fd)

    def _is_current(self) -> bool:
        try:
            return os.path.samestat(os.stat(self.path), os.fstat(self.fd))
        except FileNotFoundError:
            return False

    def _is_ours(self) -> bool:
        """Whether the file that the path names now has our token (opened anew: a shared file system may cache the old one)."""
        try:
            fd = os.open(self.path, os.O_RDONLY)
        except FileNotFoundError:
            return False
        holder = read_holder(fd)
        os.close(fd)
        return holder is not None and holder.get("token") == self._token

    def _close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


# --- who holds it ----------------------------------------------------------------------------------------------------


def own_record() -> dict[str, Any]:
    pid = os.getpid()
    record = {"host": socket.gethostname(), "pid": pid, "started": process_start(pid), **machine()}
    return record | {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z")} | job_identity()


def machine() -> dict[str, Any]:
    """What, besides the host name, tells whether a pid means the same process here: the boot and the pid namespace."""
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), "/proc/self/ns/pid"
    return {
        "boot": boot.read_text(encoding="ascii").strip() if boot.is_file() else "",
        "pid_namespace": os.readlink(namespace) if os.path.lexists(namespace) else "",
    }


def same_machine(holder: dict[str, Any]) -> bool:
    return holder.get("host") == socket.gethostname() and all(holder.get(key, value) == value for key, value in machine().items())


def process_start(pid: int) -> str | None:
    """When ``pid`` started, in kernel ticks since boot; "" where there is no /proc; None when it does not live."""
    if not Path("/proc/self/stat").is_file():
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return None
        except PermissionError:
            pass  # it lives, and is another user's
        return ""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()  # the name before it may hold anything
    return None if fields[0] in "ZX" else fields[19]


def process_lives(holder: dict[str, Any]) -> bool:
    start = process_start(holder["pid"])
    return start is not None and holder.get("started", start) == start


def is_held(path: Path) -> bool:
    """Whether somebody writes to the folder of this lock file: a live process here, or one elsewhere whose heartbeat is fresh.
    Only looks."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        holder = read_holder(fd)
        if holder is None:
            return False
        return process_lives(holder) if same_machine(holder) else time.time() - os.fstat(fd).st_mtime < STALE_SECONDS
    finally:
        os.close(fd)


def earlier_attempt(holder: dict[str, Any]) -> bool:
    """Slurm starts a requeued job only after its last attempt is gone."""
    own = job_identity()
    return bool(own) and holder.get("job") == own["job"] and int(holder["attempt"]) < int(own["attempt"])


def read_holder(fd: int) -> dict[str, Any] | None:
    """The record in an open lock file; None while there is none or it is half written."""
    try:
        holder = json.loads(os.pread(fd, 65536, 0))
    except ValueError:
        return None
    return holder if isinstance(holder, dict) and isinstance(holder.get("pid"), int) else None


def describe(holder: dict[str, Any] | None) -> str:
    if holder is None:
        return "it has not written yet who it is"
    job = f", job {holder['job']}" if "job" in holder else ""
    text = f"host {holder.get('host')}, pid {holder['pid']}{job}, since {holder.get('time')}"
    if same_machine(holder) and not process_lives(holder):
        text += " (it has ended, but processes that it started still hold the lock)"
    return text


def try_flock(fd: int) -> str:
    """ours, other's or unsupported (some shared file systems have no locks)."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return "other's"
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
            raise
        return "unsupported"
    return "ours"
