"""Ranks that torchrun started: one folder, one composition, one message."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from test_launcher import FAILED, HERE, LONG, children, environment, status, steps, wait_for


def torchrun(entry: str, *overrides: str, restarts: int = 0) -> list[str]:
    options = ["--standalone", "--nproc_per_node=2", "--monitor-interval=0.1", f"--max-restarts={restarts}"]
    return [sys.executable, "-m", "torch.distributed.run", *options, str(HERE / "toy_runs.py"), entry, *overrides]


def run_under_torchrun(tmp_path: Path, *arguments: str, restarts: int = 0) -> subprocess.CompletedProcess[str]:
    words = torchrun(*arguments, restarts=restarts)
    return subprocess.run(words, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=90)


def test_default_folder_is_one_and_a_restart_continues_in_it(tmp_path):
    """The first attempt fails on rank 1, the agent starts both ranks again."""
    result = run_under_torchrun(tmp_path, "fail_once", "trainer.max_steps=6", restarts=1)
    assert result.returncode == 0, result.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert result.stdout.count(f"from step 0 with 2 ranks in {folder.relative_to(tmp_path)}") == 1
    assert steps(folder) == [1, 2, 3, 4, 5, 6]
    assert status(folder)["state"] == "finished"
    assert sorted(p.name for p in (folder / "logs").iterdir()) == ["rank-0.log", "rank-1.log"]


def test_failure_is_told_once(tmp_path):
    result = run_under_torchrun(tmp_path, "fail_on_last_rank", "run_dir=X", LONG)
    assert result.returncode != 0
    assert result.stderr.count(f"error: rank 1: {FAILED}") == 1
    assert "Connection closed" not in result.stderr
    failed = status(tmp_path / "X")
    assert failed["state"] == "failed" and failed["rank"] == 1


def test_stop_signal_that_arrives_twice(tmp_path):
    """To all processes, as srun does: each rank gets it directly and again from torchrun's agent."""
    words = torchrun("slow", "run_dir=X", LONG)
    process = subprocess.Popen(words, cwd=tmp_path, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    wait_for(lambda: steps(tmp_path / "X"), 40)
    for pid in [*children(process.pid), process.pid]:
        subprocess.run(["kill", "-TERM", str(pid)], check=True)
    process.communicate(timeout=40)
    stopped = status(tmp_path / "X")
    assert stopped["state"] == "stopped"
    assert steps(tmp_path / "X")[-1] == stopped["step"]
