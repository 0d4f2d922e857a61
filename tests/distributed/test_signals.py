"""Stop signals: counted even inside one long operation, echoes of launchers excluded, forked helpers left out."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from twinkle_research.distributed.signals import StopSignals, signal_name


def send(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0.05)


def test_counts_and_restores():
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals(leave_on_second=False) as stop:
        assert not stop.requested
        send(signal.SIGUSR1)
        assert (stop.requested, stop.count, stop.last) == (True, 1, signal.SIGUSR1)
        send(signal.SIGTERM)
        assert (stop.count, stop.last) == (2, signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == before


def test_echo_of_a_launcher_counts_once():
    with StopSignals(echo_seconds=0.5, leave_on_second=False) as stop:
        send(signal.SIGTERM)
        send(signal.SIGTERM)
        assert stop.count == 1
        time.sleep(0.5)
        send(signal.SIGTERM)
        assert stop.count == 2


def test_ignored_after_the_end():
    with StopSignals() as stop:
        stop.ignore()
        send(signal.SIGTERM)
        send(signal.SIGTERM)
        assert not stop.requested


def test_forked_helper_does_not_count_for_its_parent():
    with StopSignals(leave_on_second=False) as stop:
        child = os.fork()
        if child == 0:
            time.sleep(5)
            os._exit(0)
        time.sleep(0.2)
        os.kill(child, signal.SIGINT)  # Ctrl-C reaches the whole process group
        os.kill(child, signal.SIGUSR1)
        time.sleep(0.2)
        assert not stop.requested
        assert os.waitpid(child, os.WNOHANG) == (0, 0)  # it lives, so the run can finish its step
        os.kill(child, signal.SIGTERM)
        _, code = os.waitpid(child, 0)
        assert os.WTERMSIG(code) == signal.SIGTERM


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
