"""What a task of slurm/sweep.sbatch prepares, and one rank of a batch job."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from twinkle_research.config.storage import load_config
from twinkle_research.errors import ConfigError
from twinkle_research.sweep.arrays import prepare_task
from twinkle_research.sweep.command import main
from twinkle_research.sweep.folder import Sweep
from twinkle_research.sweep.rank import RankFailed, RankOfJob

WORDS = ["model=tiny", "adapter.r=8,16", "seed=0,1", "-m"]


def test_tasks_make_one_sweep(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for task in (2, 0):
        prepare_task(tmp_path / "x", task, WORDS)
    configs = {task: load_config(tmp_path / "x" / str(task) / "job.yaml") for task in (0, 2)}
    assert [(c.adapter.r, c.seed, c.run_dir) for c in configs.values()] == [
        (8, 0, str(tmp_path / "x" / "0")), (16, 0, str(tmp_path / "x" / "2")),
    ]  # fmt: skip
    assert configs[0].tracking.wandb.group == "x"
    sweep = Sweep.load(tmp_path / "x")
    assert [job.overrides[1:] for job in sweep.jobs.values()] == [
        [f"adapter.r={r}", f"seed={s}"] for r in (8, 16) for s in (0, 1)
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x"]
    assert main(["resume", str(tmp_path / "x")]) == 1
    command = f"sbatch --array=0,1,2,3 slurm/sweep.sbatch model=tiny adapter.r=8,16 seed=0,1 -m hydra.sweep.dir={tmp_path / 'x'}"
    assert command in capsys.readouterr().err
    for task in (0, 1):  # prepared already, and not
        with pytest.raises(ConfigError, match="its job 2 is model=tiny adapter.r=16 seed=0, not model=tiny adapter.r=32 seed=0"):
            prepare_task(tmp_path / "x", task, ["model=tiny", "adapter.r=8,32", "seed=0,1"])


@pytest.mark.parametrize(
    ("task", "words", "message"),
    [
        (4, WORDS, r"has 4 jobs: there is no job 4; submit it with --array=0-3"),
        (0, [*WORDS, "run_dir=x"], "run_dir is one folder"),
        (0, [*WORDS, "hydra/launcher=joblib"], "'hydra/launcher' has no effect in an array"),
        (0, [*WORDS, "optimizer.lr=interval(0,1)"], "fixed list of jobs"),
        (0, [*WORDS, "optimizer.lrr=1"], "optimizer.lr"),
    ],
)
def test_tasks_that_cannot_be(tmp_path: Path, task: int, words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare_task(tmp_path / "x", task, words)
    assert not (tmp_path / "x").exists()


# --- a rank under submitit -----------------------------------------------------------------------------------------------


def script(tmp_path: Path, code: str) -> RankOfJob:
    return RankOfJob([sys.executable, "-c", code], str(tmp_path))


@pytest.fixture
def handlers():
    """Those that a rank replaces in its process, which is that of the tests here."""
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    old = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in old.items():
        signal.signal(number, handler)


def test_a_rank_tells_the_outcome_of_its_run(tmp_path: Path, handlers: None) -> None:
    assert script(tmp_path, "print('hello')")() == 0
    assert (tmp_path / "job.log").read_text() == "hello\n"
    with pytest.raises(RankFailed, match="exit code 3"):
        script(tmp_path, "raise SystemExit(3)")()


def test_the_run_is_asked_to_save_and_never_sees_submitits_signal(tmp_path: Path, handlers: None) -> None:
    """submitit's signal reaches the child too, where its default would be to die; what tells it is SIGUSR1 from rank 0."""
    code = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGUSR1, lambda *_: (print('saved', flush=True), sys.exit(75)))\n"
        "print('ready', flush=True)\n"
        "os.kill(os.getpid(), signal.SIGUSR2)\n"
        "time.sleep(30)\n"
    )
    rank = script(tmp_path, code)
    again = []

    def submitit(number: int, frame: object) -> None:
        again.append(rank.checkpoint().function)
        raise KeyboardInterrupt  # submitit leaves the process here

    signal.signal(signal.SIGUSR2, submitit)

    def preempt() -> None:
        while "ready" not in (tmp_path / "job.log").read_text():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGUSR2)

    (tmp_path / "job.log").touch()
    threading.Thread(target=preempt).start()
    with pytest.raises(KeyboardInterrupt):
        rank()
    assert (tmp_path / "job.log").read_text() == "ready\nsaved\n"
    assert (again[0].command, again[0].folder) == (rank.command, rank.folder)
