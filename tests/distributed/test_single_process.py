"""``start`` with one process: the run goes on in this very process, with the same folder, status and signals."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))
import toy_runs  # noqa: E402
from test_launcher import FAILED, LONG, files, status, steps  # noqa: E402

from twinkle_research.distributed.signals import STOP_SIGNALS  # noqa: E402


@pytest.fixture(autouse=True)
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    handlers = [signal.getsignal(number) for number in STOP_SIGNALS]
    yield
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == handlers


def test_run_finished_and_raised(tmp_path, capsys):
    assert toy_runs.main(["count", "run_dir=X", "trainer.max_steps=3"]) == 0
    assert toy_runs.main(["count", "run_dir=X", "trainer.max_steps=3"]) == 0
    assert "this run is finished (step 3)" in capsys.readouterr().out
    assert toy_runs.main(["count", "run_dir=X", "trainer.max_steps=5"]) == 0
    assert steps(tmp_path / "X") == [1, 2, 3, 4, 5]
    assert status(tmp_path / "X")["objective"] == 0.5
    assert "from step 3 with 1 ranks" in (tmp_path / "X/train.log").read_text()


@pytest.mark.parametrize("entry", ["fail_on_last_rank", "bad_data"])
def test_failure(tmp_path, capsys, entry):
    assert toy_runs.main([entry, "run_dir=X", LONG]) == 1
    screen = capsys.readouterr().err
    if entry == "bad_data":
        assert screen == "error: rows.jsonl:7: 'messages' is missing; give messages or prompt and completion\n"
    else:
        assert screen == f"error: {FAILED}\n  the traceback is in X/logs/rank-0.log\n"
    assert "in " + entry in (tmp_path / "X/logs/rank-0.log").read_text()
    failed = status(tmp_path / "X")
    assert failed["state"] == "failed" and "in " + entry in failed["traceback"]


def test_failed_run_continues(tmp_path, monkeypatch):
    assert toy_runs.main(["bad_data", "run_dir=X", LONG]) == 1
    monkeypatch.setenv("TOY_STEPS", "2")
    assert toy_runs.main(["count", "run_dir=X", LONG]) == 0
    assert steps(tmp_path / "X") == [1, 2]
    assert not (tmp_path / "X/logs/error.json").exists()


@pytest.mark.parametrize("number", STOP_SIGNALS, ids=lambda n: n.name)
def test_stop(tmp_path, capsys, monkeypatch, number):
    monkeypatch.setattr(signal, "SIGUSR1", number)  # the one that the toy run sends to itself
    assert toy_runs.main(["signal_last_rank", "run_dir=X", LONG]) == 75
    stopped = status(tmp_path / "X")
    assert stopped["state"] == "stopped" and stopped["step"] == len(steps(tmp_path / "X"))
    assert "To continue: the same command with run_dir=X" in capsys.readouterr().err


def test_eval_only_changes_nothing_of_the_run(tmp_path):
    assert toy_runs.main(["count", "run_dir=X", "trainer.max_steps=2"]) == 0
    before = files(tmp_path / "X")
    assert toy_runs.main(["count", "run_dir=X", "trainer.max_steps=2", "eval_only=true"]) == 0
    after = files(tmp_path / "X")
    assert json.loads(after.pop("evaluation.json")) == {"step": 2}
    assert after == before
    assert status(tmp_path / "X/eval_only")["state"] == "finished"


def test_default_folder(tmp_path):
    assert toy_runs.main(["count", "trainer.max_steps=1"]) == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert status(folder)["state"] == "finished"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere; run the tests as another user")
def test_folder_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "closed").mkdir(mode=0o500)
    assert toy_runs.main(["count", "run_dir=closed/X"]) == 1
    assert "closed/X" in capsys.readouterr().err
