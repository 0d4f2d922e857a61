"""The folder of a sweep that is given again, and a sweep that is asked to stop. Jobs are quick (sweep_toys.py)."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
import sweep_toys

from twinkle_research.config.cli import main
from twinkle_research.distributed import launcher
from twinkle_research.distributed.signals import StopSignals
from twinkle_research.errors import ConfigError
from twinkle_research.sweep.arrays import prepare_task
from twinkle_research.sweep.job import record_failure
from twinkle_research.trainer.rundir import RunFolder

WORDS = ["-m", "model=tiny", "hydra.sweep.dir=sweeps/x"]


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Numbers of the jobs that are started. There is a file "kill" where a signal comes in their last step."""
    monkeypatch.chdir(tmp_path)
    numbers = []

    def start(cfg, plan, in_process):
        numbers.append(Path(cfg.run_dir).name)
        with StopSignals(leave_on_second=False):  # as launcher.start has
            code = sweep_toys.quick(cfg, plan)
            if Path("kill").exists():
                os.kill(os.getpid(), signal.SIGTERM)
        return code

    monkeypatch.setattr(launcher, "start", start)
    return numbers


def contents() -> dict[str, bytes]:
    return {str(path): path.read_bytes() for name in ("*.json", "*.html", "*/*.json") for path in Path("sweeps/x").glob(name)}


def state() -> tuple[str, list[str]]:
    stored = json.loads(Path("sweeps/x/sweep.json").read_text())
    return stored["state"], [job["state"] for job in stored["jobs"]]


def test_jobs_keep_the_settings_that_they_have_run_with(started: list[str], capsys: pytest.CaptureFixture) -> None:
    assert main([*WORDS, "optimizer.lr=1e-4,3e-4"]) == 0
    before = contents()
    assert len(before) == 4
    for kind in ("basic", "joblib", "submitit_local"):
        assert main([*WORDS, "seed=5,6", f"hydra/launcher={kind}"]) == 2
        error = capsys.readouterr().err
        path = Path("sweeps/x").absolute()
        assert f"{path} holds job 0 with model=tiny optimizer.lr=0.0001, not model=tiny seed=5: give those, or another" in error
        assert "'seed' was" in error and started == ["0", "1"] and contents() == before


@pytest.mark.long
def test_what_a_run_can_be_continued_with_is_allowed(started: list[str]) -> None:
    assert main([*WORDS, "trainer.max_steps=1,2"]) == 0
    assert main([*WORDS, "trainer.max_steps=1,3"]) == 0
    assert started == ["0", "1", "1"]
    assert main([*WORDS, "trainer.max_steps=1,2"]) == 2


@pytest.mark.long
def test_a_refused_sweep_leaves_one_that_had_not_begun(started: list[str]) -> None:
    Path("kill").touch()
    assert main([*WORDS, "seed=1,2"]) == 75
    before = contents()
    assert main([*WORDS, "seed=3,2"]) == 2
    assert contents() == before


def test_the_account_of_a_finished_run_stays(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    folder.write_status("finished", objective=0.5)
    before = folder.read_status()
    record_failure(folder, ConfigError("no"))
    assert folder.read_status() == before
    folder.write_status("stopped")
    record_failure(folder, ConfigError("no"))
    assert folder.read_status()["state"] == "failed"


STUDY = ["hydra/sweeper=optuna", "hydra/sweeper/sampler=random", "hydra.sweeper.n_trials=3", "adapter.r=interval(8,64)"]


@pytest.mark.long
@pytest.mark.parametrize(("words", "jobs"), [(["seed=0,1,2"], 3), (STUDY, 2)])
def test_a_signal_in_the_last_step_of_a_job_stops_the_sweep(words: list[str], jobs: int, started: list[str]) -> None:
    Path("kill").touch()
    assert main([*WORDS, *words]) == 75
    assert started == ["0"] and state() == ("stopped", ["finished", *["waiting"] * (jobs - 1)])
    Path("kill").unlink()
    assert main([*WORDS, *words]) == 0
    assert started == ["0", "1", "2"] and state() == ("finished", ["finished"] * 3)


@pytest.mark.long
def test_a_study_of_few_different_jobs_runs_each_once(started: list[str], capsys: pytest.CaptureFixture) -> None:
    assert main([*WORDS, "hydra/sweeper=optuna", "adapter.r=8,16", "seed=range(1,3)"]) == 0
    assert "make 4 different jobs: each is run once, in place of hydra.sweeper.n_trials=20" in capsys.readouterr().out
    jobs = json.loads(Path("sweeps/x/sweep.json").read_text())["jobs"]
    assert sorted(job["overrides"][-2:] for job in jobs) == [[f"adapter.r={r}", f"seed={s}"] for r in (16, 8) for s in (1, 2)]
    assert len(started) == 4


@pytest.mark.long
def test_a_study_that_is_refused_leaves_what_is_there(started: list[str], capsys: pytest.CaptureFixture) -> None:
    words = [word.replace("n_trials=3", "n_trials=1") for word in STUDY]
    assert main([*WORDS, *words]) == 0
    before = contents()
    assert main([*WORDS, *words, "seed=3"]) == 2
    assert "holds a study with other settings" in capsys.readouterr().err and contents() == before
    Path("sweeps/x/study.db").unlink()
    assert main([*WORDS, *words]) == 2
    assert "holds jobs that are not in the study" in capsys.readouterr().err and contents() == before


def test_requests_pass_between_signals_within_others() -> None:
    with StopSignals(leave_on_second=False, lasting=True) as outer:
        with StopSignals() as inner:
            os.kill(os.getpid(), signal.SIGTERM)
        assert (outer.count, outer.last) == (1, signal.SIGTERM)
        with StopSignals() as inner:
            assert inner.requested
        assert outer.count == 1
        os.kill(os.getpid(), signal.SIGUSR1)
        deadline = time.monotonic() + 10
        while outer.count < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert outer.count == 2
    assert StopSignals._installed is None


def test_a_folder_that_cannot_be(capsys: pytest.CaptureFixture) -> None:
    Path("file").touch()
    for folder, message in (("file", "file is a file, not a folder"), ("file/a/b", "file is a file"), ("/proc/x", "/proc/x")):
        assert main(["-m", "model=tiny", "seed=0,1", f"hydra.sweep.dir={folder}"]) == 2
        error = capsys.readouterr().err
        assert "hydra.sweep.dir=" in error and message in error


def test_a_folder_within_anothers(started: list[str], capsys: pytest.CaptureFixture) -> None:
    run = RunFolder(Path("run").absolute())
    run.create()
    run.write_status("stopped")
    Path("sweep").mkdir()
    Path("sweep/sweep.json").touch()
    before = sorted(Path().rglob("*"))
    for folder, message in (
        ("run", f"{run} is the folder of a run"),
        ("run/a/b", f"{run} is the folder of a run"),
        ("sweep/0", f"{Path('sweep').absolute()} is the folder of another sweep"),
    ):
        assert main(["-m", "model=tiny", "seed=0,1", f"hydra.sweep.dir={folder}"]) == 2
        error = capsys.readouterr().err
        assert f"hydra.sweep.dir={Path(folder).absolute()}: {message}" in error and not started
        with pytest.raises(ConfigError, match=message):
            prepare_task(Path(folder), 0, ["model=tiny", "seed=0,1"])
    assert sorted(Path().rglob("*")) == before


@pytest.mark.parametrize(
    "word",
    ["hydra.sweep.dir=a", "hydra/launcher=joblib", "hydra/sweeper=optuna", "+hydra.launcher.x=1", "hydra.sweeper.params=null"],
)
def test_words_of_sweeps_without_m(word: str, started: list[str], capsys: pytest.CaptureFixture) -> None:
    assert main(["model=tiny", word]) == 2
    assert "has no effect without -m (--multirun)" in capsys.readouterr().err and not started
