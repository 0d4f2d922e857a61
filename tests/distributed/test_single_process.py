"""``start`` with one process: the run goes on in this very process, with the same folder, status and signals."""

from __future__ import annotations

import json
import signal

import pytest
import toy_runs
from test_launcher import FAILED, LONG, files, status, steps

from twinkle_research.distributed.signals import STOP_SIGNALS


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


def test_folder_that_cannot_be_made(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert toy_runs.main(["count", "run_dir=file/X"]) == 1
    assert capsys.readouterr().err.startswith("error: cannot write to run_dir=file/X")


def test_checkpoints_without_config_are_not_overwritten(tmp_path, capsys):
    (tmp_path / "X/checkpoints/step-000003").mkdir(parents=True)
    assert toy_runs.main(["count", "run_dir=X"]) == 1
    assert "no config.yaml" in capsys.readouterr().err
    assert not (tmp_path / "X/config.yaml").exists()


def joined(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """The code of a run of one rank that another launcher started. Such a process ends, so it gives no signals back."""
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as left:
        toy_runs.main(list(words))
    for number, handler in handlers.items():
        signal.signal(number, handler)
    return left.value.code


def test_joined_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "sweep-7")
    for steps_now in (2, 4):
        assert joined(monkeypatch, "count", f"trainer.max_steps={steps_now}") == 0
    assert joined(monkeypatch, "count", "trainer.max_steps=4") == 0
    assert "this run is finished (step 4)" in capsys.readouterr().out
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name == "torchrun-sweep-7-cross_entropy-tiny"
    assert steps(folder) == [1, 2, 3, 4]
    assert joined(monkeypatch, "count", "trainer.max_steps=9", "seed=1") == 2
    assert "'seed' was 0, is now 1" in capsys.readouterr().err
    assert joined(monkeypatch, "signal_last_rank", LONG) == 75
    assert status(folder)["state"] == "stopped"
