"""sweep.json, what is read from the run folders, and the commands that look at a sweep."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from twinkle_research.errors import UserError
from twinkle_research.sweep.command import main
from twinkle_research.sweep.folder import Plan, Sweep, SweepJob
from twinkle_research.trainer.rundir import RunFolder

PLAN = Plan(["model=tiny", "seed=0,1,2", "-m"], ".", "basic", "basic", ["seed"], "eval/accuracy", "maximize")


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    """Four jobs: 0 and 1 have finished, 2 has failed, 3 was never started."""
    sweep = Sweep(tmp_path / "grid", PLAN, {n: SweepJob(n, ["model=tiny", f"seed={n}"]) for n in range(4)})
    for number, fields in {0: {"objective": 0.5}, 1: {"objective": 0.75}, 2: {"message": "no room\non the disk"}}.items():
        folder = RunFolder(sweep.path / str(number))
        folder.create()
        folder.write_status("failed" if "message" in fields else "finished", **fields)
    sweep.save()
    return sweep


def loaded(sweep: Sweep) -> Sweep:
    again = Sweep.load(sweep.path)
    again.refresh()
    return again


def test_what_is_written_is_read(sweep: Sweep) -> None:
    again = Sweep.load(sweep.path)
    assert (again.plan, again.jobs, again.state) == (sweep.plan, sweep.jobs, "running")
    assert [path.name for path in sweep.path.glob("*.tmp")] == []


def test_the_run_folders_say_how_the_jobs_are(sweep: Sweep) -> None:
    again = loaded(sweep)
    assert [job.state for job in again.jobs.values()] == ["finished", "finished", "failed", "waiting"]
    assert again.jobs[2].error == "no room"
    assert [job.number for job in again.ranked()] == [1, 0]  # the higher the better
    assert [job.number for job in again.unfinished()] == [2, 3]
    assert again.state == "killed"  # nobody holds the lock of this sweep
    again.plan.direction = "minimize"
    assert [job.number for job in again.ranked()] == [0, 1]


def test_a_run_that_nobody_runs_was_killed(sweep: Sweep) -> None:
    folder = RunFolder(sweep.path / "3")
    folder.create()
    folder.write_status("running")
    assert loaded(sweep).jobs[3].state == "killed"
    folder.lock.acquire()
    assert loaded(sweep).jobs[3].state == "running"
    folder.lock.release()


@pytest.mark.parametrize("objective", [float("nan"), float("inf"), None, "0.9"])
def test_what_is_no_number_is_not_the_best(sweep: Sweep, objective: object) -> None:
    RunFolder(sweep.path / "1").write_status("finished", objective=objective)
    assert [job.number for job in loaded(sweep).ranked()] == [0]


def test_a_study_is_complete_when_it_has_all_its_trials(sweep: Sweep) -> None:
    sweep.jobs = {0: sweep.jobs[0], 1: sweep.jobs[1]}
    sweep.plan.trials = 3
    sweep.save()
    assert loaded(sweep).counts() == {"waiting": 1, "finished": 2} and not loaded(sweep).is_complete()
    sweep.plan.trials = 2
    sweep.save()
    assert loaded(sweep).is_complete() and loaded(sweep).state == "finished"


def test_status_and_best(sweep: Sweep, capsys: pytest.CaptureFixture) -> None:
    assert main(["status", str(sweep.path)]) == 0
    text = capsys.readouterr().out
    assert "killed; 1 waiting, 2 finished, 1 failed" in text and "no room" in text and "seed=3" in text
    assert main(["best", str(sweep.path)]) == 0
    assert capsys.readouterr().out.splitlines() == [str(sweep.path / "1"), "eval/accuracy 0.75 at step 0", "model=tiny seed=1"]
    assert main(["best", str(sweep.path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["job"], found["objective"], found["overrides"]) == (1, 0.75, ["model=tiny", "seed=1"])
    assert main(["status", str(sweep.path), "--json"]) == 0
    assert [job["state"] for job in json.loads(capsys.readouterr().out)["jobs"]] == ["finished", "finished", "failed", "waiting"]


def test_there_is_no_best_of_different_objectives(sweep: Sweep, capsys: pytest.CaptureFixture) -> None:
    sweep.plan.metric = sweep.plan.direction = None
    sweep.save()
    assert main(["best", str(sweep.path)]) == 1
    assert "no objective in common" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("gird", "did you mean {}/grid"),
        ("grid/1", "it is a job of {}/grid"),
        (".", "newest sweep in it is {}/grid"),
        ("far/away", "no such folder"),
    ],
)
def test_a_folder_that_is_no_sweep(sweep: Sweep, path: str, hint: str, capsys: pytest.CaptureFixture) -> None:
    root = sweep.path.parent
    for command in ("status", "best", "resume", "report"):
        assert main([command, str(root / path)]) == 1
        message = capsys.readouterr().err
        assert "is not the folder of a sweep (it has no sweep.json)" in message and hint.format(root) in message


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 2}', '{"format": 1, "jobs": [{"numbr": 1}]}'])
def test_a_damaged_file_is_named(sweep: Sweep, text: str) -> None:
    (sweep.path / "sweep.json").write_text(text)
    with pytest.raises(UserError, match="sweep.json"):
        Sweep.load(sweep.path)


def test_a_finished_sweep_has_nothing_to_resume(sweep: Sweep, capsys: pytest.CaptureFixture) -> None:
    for number in (2, 3):
        RunFolder(sweep.path / str(number)).create()
        RunFolder(sweep.path / str(number)).write_status("finished", objective=0.1)
    assert main(["resume", str(sweep.path)]) == 0
    assert "all its 4 jobs have finished" in capsys.readouterr().out
