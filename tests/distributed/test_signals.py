"""Stop signals: counted even inside one long operation, echoes of launchers excluded, forked helpers left out."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from children import wait_until

from twinkle_research.distributed import signals
from twinkle_research.distributed.signals import StopSignals, signal_name


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def at_the_end(stop: StopSignals) -> tuple[int, int]:
    """Count and last signal, when all that has come is seen to: the pipe was closed, so its reader ends."""
    stop._thread.join(30)
    assert not stop._thread.is_alive()
    return stop.count, stop.last


def test_counts_and_restores():
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals(leave_on_second=False) as stop:
        assert not stop.requested
        send(signal.SIGUSR1)
        wait_until(lambda: stop.requested)
        assert (stop.count, stop.last) == (1, signal.SIGUSR1)
        send(signal.SIGTERM)
    assert at_the_end(stop) == (2, signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(("after", "count", "last"), [(1.9, 1, signal.SIGTERM), (2.1, 2, signal.SIGINT)], ids=["echo", "request"])
def test_echo_of_a_launcher_counts_once(monkeypatch, after, count, last):
    """Whether a second signal is the same request depends on the time between the two alone."""
    now = 1000.0
    monkeypatch.setattr(signals, "time", SimpleNamespace(monotonic=lambda: now))
    with StopSignals(echo_seconds=2.0, leave_on_second=False) as stop:
        send(signal.SIGTERM)
        wait_until(lambda: stop.requested)
        now += after
        send(signal.SIGINT)
    assert at_the_end(stop) == (count, last)


def test_ignored_after_the_end():
    with StopSignals() as stop:
        stop.ignore()
        send(signal.SIGTERM)
        send(signal.SIGTERM)
    assert at_the_end(stop) == (0, 0)


def test_forked_helper_does_not_count_for_its_parent():
    ready, tell = os.pipe()
    with StopSignals(leave_on_second=False) as stop:
        child = os.fork()
        if child == 0:
            os.write(tell, b".")
            time.sleep(60)
            os._exit(0)
        os.read(ready, 1)
        os.kill(child, signal.SIGINT)  # Ctrl-C reaches the whole process group
        os.kill(child, signal.SIGUSR1)
        time.sleep(0.2)
        assert not stop.requested
        assert os.waitpid(child, os.WNOHANG) == (0, 0)  # it lives, so the run can finish its step
        os.kill(child, signal.SIGTERM)
        _, code = os.waitpid(child, 0)
        assert os.WTERMSIG(code) == signal.SIGTERM
    os.close(ready)
    os.close(tell)
    assert at_the_end(stop) == (0, 0)


LEAVE = """
import os, signal, sys, time
from twinkle_research.distributed.signals import StopSignals
def hang():
    print("told", flush=True)
    time.sleep(60)
stop = StopSignals(on_second=hang)
stop.install()
if sys.argv[1] == "waiting":
    with stop.leaving_on_first():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
os.kill(os.getpid(), signal.SIGTERM)
os.kill(os.getpid(), signal.SIGINT)
time.sleep(60)
"""


@pytest.mark.parametrize("mode,code,told", [("running", 130, "told\n"), ("waiting", 75, "")])
def test_leaves_at_once_even_if_the_disk_hangs(mode, code, told):
    began = time.monotonic()
    result = subprocess.run([sys.executable, "-c", LEAVE, mode], capture_output=True, text=True, timeout=30)
    assert (result.returncode, result.stdout) == (code, told)
    assert time.monotonic() - began < 10


def test_names():
    assert signal_name(9) == "SIGKILL"
    assert signal_name(99) == "signal 99"
