"""Whole runs of real processes: how they start, end, fail and are stopped. No training: see toy_runs.py."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
PYTHONPATH = os.pathsep.join([str(HERE.parent.parent), str(HERE)])
TWO = "launch.nproc_per_node=2"
LONG = "trainer.max_steps=100000"
FAILED = "ValueError: the flux capacitor of this rank is empty"


def command(entry: str, *overrides: str) -> list[str]:
    return [sys.executable, str(HERE / "toy_runs.py"), entry, *overrides]


def environment(**more: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": PYTHONPATH} | more


def run(entry: str, *overrides: str, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(entry, *overrides), cwd=cwd, env=environment(**more), capture_output=True, text=True, timeout=120
    )


def begin(entry: str, *overrides: str, cwd: Path) -> subprocess.Popen[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command(entry, *overrides), cwd=cwd, env=environment(), **pipes)


def status(folder: Path) -> dict:
    return json.loads((folder / "status.json").read_text())


def steps(folder: Path) -> list[int]:
    file = folder / "metrics.jsonl"
    return [json.loads(line)["step"] for line in file.read_text().splitlines()] if file.exists() else []


def files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}


def wait_for(condition, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


# --- starting and ending --------------------------------------------------------------------------------------------


def test_run_finished_refused_and_raised(tmp_path):
    folder = tmp_path / "X"
    first = run("count", "run_dir=X", "trainer.max_steps=3", TWO, cwd=tmp_path)
    assert (first.returncode, first.stderr) == (0, "")
    assert "from step 0 with 2 ranks in X" in first.stdout
    assert "from step 0 with 2 ranks in X" in (folder / "train.log").read_text()
    assert status(folder) | {"time": ""} == {"state": "finished", "step": 3, "objective": 0.5, "time": ""}
    assert sorted(p.name for p in (folder / "logs").iterdir()) == ["rank-0.log", "rank-1.log"]
    assert [json.loads(row)["ranks"] for row in (folder / "metrics.jsonl").read_text().splitlines()] == [2.0] * 3
    assert (folder / "run.lock").read_bytes() == b""
    before = files(folder)

    again = run("count", "run_dir=X", "trainer.max_steps=3", TWO, cwd=tmp_path)
    assert (again.returncode, again.stderr) == (0, "")
    assert "this run is finished (step 3)" in again.stdout

    changed = run("count", "run_dir=X", "trainer.max_steps=4", "optimizer.lr=0.5", TWO, cwd=tmp_path)
    assert changed.returncode == 2
    assert "optimizer.lr" in changed.stderr and "Traceback" not in changed.stderr

    never = run("count", "run_dir=X", "trainer.max_steps=4", "resume=never", TWO, cwd=tmp_path)
    assert never.returncode == 2
    assert "resume=never" in never.stderr
    assert files(folder) == before

    more = run("count", "run_dir=X", "trainer.max_steps=5", "--child", cwd=tmp_path)
    assert more.returncode == 0, more.stderr
    assert steps(folder) == [1, 2, 3, 4, 5]
    assert [p.name for p in tmp_path.iterdir()] == ["X"]


# --- failing --------------------------------------------------------------------------------------------------------


def test_failure_on_one_screen(tmp_path):
    """The failing rank leaves after its peer, which died of the closed connection: its own error is shown all the same."""
    folder = tmp_path / "X"
    result = run("fail_and_linger", "run_dir=X", LONG, TWO, cwd=tmp_path)
    assert result.returncode == 1
    screen = f"error: rank 1: {FAILED}\n  the traceback is in X/logs/rank-1.log\n"
    assert result.stderr == screen
    failed = status(folder)
    assert (failed["state"], failed["rank"], failed["type"]) == ("failed", 1, "ValueError")
    for text in (failed["traceback"], (folder / "logs/rank-1.log").read_text()):
        assert "in fail_and_linger" in text and FAILED in text
    assert screen in (folder / "train.log").read_text()
    assert "peer" in (folder / "logs/rank-0.log").read_text()  # what rank 0 saw is kept, off the screen


def test_an_error_of_all_ranks_is_told_once(tmp_path):
    result = run("bad_data", "run_dir=X", LONG, TWO, cwd=tmp_path)
    assert result.returncode == 1
    assert result.stderr == "error: rows.jsonl:7: 'messages' is missing; give messages or prompt and completion\n"


def test_busy_ranks_are_ended(tmp_path):
    began = time.monotonic()
    result = run("fail_beside_a_busy_rank", "run_dir=X", LONG, TWO, cwd=tmp_path)
    assert time.monotonic() - began < 40
    assert result.returncode == 1
    assert status(tmp_path / "X")["rank"] == 1


def test_killed_worker_is_named(tmp_path):
    began = time.monotonic()
    result = run("die", "run_dir=X", LONG, TWO, cwd=tmp_path)
    assert time.monotonic() - began < 40  # a few seconds on a machine that does nothing else
    assert result.returncode == 1
    assert "error: rank 1: killed by SIGKILL" in result.stderr
    failed = status(tmp_path / "X")
    assert failed["state"] == "failed" and failed["rank"] == 1 and "SIGKILL" in failed["message"]


def test_crashed_worker_leaves_its_stack(tmp_path):
    result = run("crash", "run_dir=X", "--child", cwd=tmp_path)
    assert result.returncode == 1
    assert "error: killed by SIGSEGV" in result.stderr
    assert "in crash" in (tmp_path / "X/logs/rank-0.log").read_text()


def test_worker_without_account(tmp_path):
    result = run("vanish", "run_dir=X", "--child", cwd=tmp_path)
    assert result.returncode == 1
    assert "ended with exit code 7" in result.stderr


def test_second_writer_and_killed_launcher(tmp_path):
    process = begin("slow", "run_dir=X", LONG, TWO, cwd=tmp_path)
    wait_for(lambda: steps(tmp_path / "X"))
    second = run("count", "run_dir=X", LONG, cwd=tmp_path)
    assert second.returncode == 1
    assert f"host {socket.gethostname()}, pid {process.pid}" in second.stderr
    assert status(tmp_path / "X")["state"] == "running"

    workers = children(process.pid)
    assert len(workers) == 2
    process.kill()
    process.communicate()
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers), seconds=5)
    done = len(steps(tmp_path / "X"))
    again = run("count", "run_dir=X", LONG, cwd=tmp_path, TOY_STEPS="3")
    assert again.returncode == 0, again.stderr
    assert steps(tmp_path / "X") == list(range(1, done + 4))


# --- stopping -------------------------------------------------------------------------------------------------------


def test_stop_by_ctrl_c_and_continue(tmp_path):
    """Ctrl-C goes to the whole foreground process group; the workers get it once, from the launcher."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    process = subprocess.Popen(command("slow", "run_dir=X", LONG, TWO), cwd=tmp_path, env=environment(), **pipes)
    wait_for(lambda: steps(tmp_path / "X"))
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 75, errors
    done = steps(tmp_path / "X")
    assert done == list(range(1, len(done) + 1))
    assert errors == f"stopped at step {done[-1]} of 100000. To continue: the same command with run_dir=X\n"
    stopped = status(tmp_path / "X")
    assert stopped["state"] == "stopped" and stopped["step"] == done[-1]
    # It goes on from there, until a signal that only one rank gets stops both at the same step.
    again = run("signal_last_rank", "run_dir=X", LONG, TWO, cwd=tmp_path)
    assert again.returncode == 75, again.stderr
    more = steps(tmp_path / "X")
    assert more == list(range(1, len(more) + 1)) and len(more) > len(done)


def test_signal_before_the_workers_listen(tmp_path):
    """A worker that is still starting keeps the signal for later instead of dying of it."""
    process = begin("slow", "run_dir=X", LONG, TWO, cwd=tmp_path)
    wait_for(lambda: len(children(process.pid)) == 2)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 75, errors


@pytest.mark.parametrize("layout", [[], [TWO]], ids=["here", "two"])
def test_second_signal_leaves_at_once(tmp_path, layout):
    process = begin("long_operation", "run_dir=X", *layout, cwd=tmp_path)
    log = tmp_path / "X/train.log"
    wait_for(lambda: log.exists() and "in the long" in log.read_text(), 40)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert time.monotonic() - began < 3
    assert process.returncode == 130
    assert status(tmp_path / "X")["state"] == "stopped"
