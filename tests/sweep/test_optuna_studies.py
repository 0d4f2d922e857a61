"""Studies that are killed, over a bowl whose lowest point is known (sweep_toys.py)."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import sweep_toys
from children import wait_until

WORDS = ["-m", "model=tiny", "hydra/sweeper=optuna", "optimizer.lr=tag(log,interval(1e-5,1))", "adapter.r=interval(1,64)"]
WORDS += ["hydra.sweeper.sampler.n_startup_trials=6"]
TRIALS = "hydra.sweeper.n_trials=14"
SECONDS = 120


def jobs(folder: Path) -> list[dict]:
    return json.loads((folder / "sweep.json").read_text())["jobs"]


def finished(folder: Path) -> int:
    return len(list(folder.glob("*/metrics.jsonl")))


@pytest.mark.long
def test_a_study_finds_the_optimum_and_goes_on_after_kills_as_if_there_were_none(tmp_path: Path) -> None:
    whole = sweep_toys.start("train", *WORDS, TRIALS, "hydra.sweep.dir=whole", cwd=tmp_path)
    killed = sweep_toys.start("train", *WORDS, TRIALS, "hydra.sweep.dir=killed", cwd=tmp_path, TOY_PAUSE="0.05")
    folder = tmp_path / "killed"
    for count in (3, 8):  # in its random draws, and when it has begun to use what they found
        wait_until(lambda count=count: finished(folder) >= count, SECONDS)
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        assert len(jobs(folder)) < 14
        killed = sweep_toys.start("sweep", "resume", "killed", cwd=tmp_path, TOY_PAUSE="0.05")
    text, _ = killed.communicate(timeout=SECONDS)
    whole.communicate(timeout=SECONDS)
    assert len(jobs(folder)) == 14, text
    same = [[(job["overrides"], job["state"], job["objective"]) for job in jobs(tmp_path / name)] for name in ("whole", "killed")]
    assert same[0] == same[1]
    best = min((job for job in jobs(folder) if job["objective"] is not None), key=lambda job: job["objective"])
    assert best["objective"] < 0.5  # a draw at random is so near with a probability of 5 %
    report = (folder / "report.html").read_text()
    assert "polyline" in report and f'<th scope="row"><span class="swatch" data-run="{best["number"]}"' in report
    assert (killed.returncode, "14 finished" in text) in ((0, True), (1, False))  # 1: a job was at adapter.r=7


@pytest.mark.long
def test_a_failed_trial_counts_for_nothing_and_is_run_again(tmp_path: Path) -> None:
    """A grid with a value that fails; resumed when the bowl is mended only its jobs run, and the study has their values."""
    words = ["-m", "model=tiny", "hydra/sweeper=optuna", "hydra/sweeper/sampler=grid", "seed=0,1", "adapter.r=range(7,28,10)"]
    study = sweep_toys.start("train", *words, "hydra.sweep.dir=grid", "hydra.sweeper.n_jobs=4", cwd=tmp_path)
    text, _ = study.communicate(timeout=SECONDS)
    assert study.returncode == 1 and "2 of the sweep's jobs failed" in text, text
    assert min(values_of(tmp_path / "grid")) > 0 and len(values_of(tmp_path / "grid")) == 4
    (tmp_path / "go").touch()
    study = sweep_toys.start("sweep", "resume", "grid", cwd=tmp_path)
    text, _ = study.communicate(timeout=SECONDS)
    assert study.returncode == 0 and text.count("this run is finished") == 0 and text.count("job ") >= 2, text
    assert [job["state"] for job in jobs(tmp_path / "grid")] == ["finished"] * 6
    assert values_of(tmp_path / "grid") == sorted(job["objective"] for job in jobs(tmp_path / "grid"))


def values_of(folder: Path) -> list[float]:
    """Of the study in it."""
    import optuna

    study = optuna.load_study(study_name=folder.name, storage=f"sqlite:///{folder}/study.db")
    return sorted(trial.value for trial in study.trials if trial.value is not None)
