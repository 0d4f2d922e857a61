"""run.lock: one live writer, and safe to take over from a dead one, here, after a requeue and from another host."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from twinkle_research.errors import UserError
from twinkle_research.trainer import runlock
from twinkle_research.trainer.runlock import RunLock, own_record

HOLD = """
import sys, time
from pathlib import Path
from twinkle_research.trainer.runlock import RunLock
RunLock(Path(sys.argv[1])).acquire()
print("held", flush=True)
time.sleep(60)
"""
CONTEND = """
import sys, time
from pathlib import Path
from twinkle_research.errors import UserError
from twinkle_research.trainer.runlock import RunLock
time.sleep(max(0, float(sys.argv[2]) - time.time()))
try:
    RunLock(Path(sys.argv[1])).acquire()
except UserError:
    print("refused")
else:
    print("held", flush=True)
    time.sleep(1.5)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.lock"


def python(code: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], stdout=subprocess.PIPE, text=True)


def hold_elsewhere(path: Path, code: str = HOLD) -> subprocess.Popen[str]:
    process = python(code, path)
    assert process.stdout.readline() == "held\n"
    return process


def test_content_and_release(path):
    lock = RunLock(path)
    lock.acquire()
    record = json.loads(path.read_text())
    assert record["host"] == socket.gethostname() and record["pid"] == os.getpid()
    assert record["started"] and record["boot"] and record["time"]
    with pytest.raises(UserError, match=f"host {socket.gethostname()}, pid {os.getpid()}"):
        RunLock(path).acquire()
    lock.release()
    lock.release()
    assert path.read_text() == ""
    again = RunLock(path)
    again.acquire()
    again.release()


def test_live_holder_is_refused_and_killed_one_is_not(path):
    process = hold_elsewhere(path)
    with pytest.raises(UserError, match=f"pid {process.pid}"):
        RunLock(path).acquire()
    process.kill()
    began = time.monotonic()
    lock = RunLock(path)  # not waited for: it is a zombie, or not yet even that
    lock.acquire()
    assert time.monotonic() - began < 5
    process.wait()
    lock.release()


def test_stopped_holder_still_holds(path):
    process = hold_elsewhere(path)
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(UserError, match=f"pid {process.pid}"):
        RunLock(path).acquire()
    process.kill()
    process.wait()


def test_one_of_many_at_the_same_moment(path):
    for content in ("", json.dumps(own_record() | {"pid": 4194303})):  # a new folder, and one whose holder is dead
        path.write_text(content)
        contenders = [python(CONTEND, path, time.time() + 1.0) for _ in range(4)]
        answers = [process.communicate(timeout=60)[0].strip() for process in contenders]
        assert sorted(answers) == ["held", "refused", "refused", "refused"]


def test_pid_that_another_process_has_now(path):
    path.write_text(json.dumps(own_record() | {"started": "1"}))
    lock = RunLock(path)
    lock.acquire()
    lock.release()


def test_torn_and_foreign_content(path):
    for content in ('{"host": "x", "pi', "[]", "null", '{"pid": "x"}'):
        path.write_text(content)
        lock = RunLock(path)
        lock.acquire()
        lock.release()


def test_requeued_job_takes_over_from_its_last_attempt(path, monkeypatch):
    """On another node, moments after the crash: no pid to ask, and no time to wait for the heartbeat."""
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    path.write_text(json.dumps(own_record() | {"host": "node1", "job": "77", "attempt": "0"}))
    lock = RunLock(path)
    lock.acquire()
    assert json.loads(path.read_text())["attempt"] == "1"
    lock.release()


def test_other_step_of_the_same_attempt_is_no_earlier_one(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    assert not runlock.earlier_attempt({"job": "77", "attempt": "0", "host": "node1", "pid": 1})
    assert not runlock.earlier_attempt({"host": "node1", "pid": 1})


def test_heartbeat_of_another_host_decides(path, monkeypatch, capsys):
    monkeypatch.setattr(runlock, "STALE_SECONDS", 3.0)
    record = json.dumps(own_record() | {"host": "node1", "job": "12"})
    # It beats while we look: it lives.
    beat = python("import os, sys, time\nfor _ in range(40): os.utime(sys.argv[1]); time.sleep(0.2)", path)
    path.write_text(record)
    with pytest.raises(UserError, match="host node1, pid .*, job 12"):
        RunLock(path).acquire()
    assert "to see whether it lives" in capsys.readouterr().err
    beat.kill()
    beat.wait()
    # It does not beat: after a while it is dead.
    began = time.monotonic()
    lock = RunLock(path)
    lock.acquire()
    assert time.monotonic() - began < 10
    lock.release()


def test_flock_that_a_dead_client_left_on_the_server(path, monkeypatch):
    """The old file is left behind with its flock; nobody can be refused by it again."""
    path.write_text(json.dumps(own_record() | {"host": "node1"}))
    os.utime(path, (0, 0))
    with path.open("r+") as stuck:
        fcntl.flock(stuck, fcntl.LOCK_EX)
        lock = RunLock(path)
        lock.acquire()
        assert json.loads(path.read_text())["pid"] == os.getpid()
        with pytest.raises(UserError):
            RunLock(path).acquire()
        lock.release()


def test_file_system_without_flock(path, monkeypatch):
    def no_locks(fd: int, operation: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    lock = RunLock(path)
    lock.acquire()
    with pytest.raises(UserError, match=f"pid {os.getpid()}"):
        RunLock(path).acquire()
    lock.release()
    path.write_text(json.dumps(own_record() | {"pid": 4194303}))  # dead
    lock.acquire()
    lock.release()


def test_forked_helper_does_not_keep_the_lock(path):
    fork = "import os\nif os.fork() == 0: print(os.getpid(), flush=True)\ntime.sleep(60)"
    code = HOLD.replace("time.sleep(60)", fork)
    process = hold_elsewhere(path, code)
    helper = int(process.stdout.readline())
    process.kill()
    process.wait()
    os.kill(helper, 0)  # it lives
    lock = RunLock(path)
    lock.acquire()
    lock.release()
    os.kill(helper, signal.SIGKILL)


def test_holder_that_lost_the_lock_leaves(path):
    """It was stopped for so long that another host took over: it must not write on."""
    code = HOLD.replace("RunLock(Path", "import twinkle_research.trainer.runlock as r; r.HEARTBEAT_SECONDS = 0.1\nRunLock(Path")
    process = hold_elsewhere(path, code)
    path.unlink()
    path.write_text(json.dumps(own_record()))
    assert process.wait(timeout=10) == 1
