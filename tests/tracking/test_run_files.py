"""metrics.jsonl, timing.jsonl, samples.jsonl: byte-identical after a resume, whole after a kill."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tracked_run import ROOT, config, loss_at, train

from twinkle_research.errors import CheckpointError
from twinkle_research.tracking.build import build_tracker
from twinkle_research.tracking.files import JsonLines, cut_back, encode, plain_row, read_rows, write_atomic

NAMES = ("metrics.jsonl", "timing.jsonl", "samples.jsonl")


def tracker(folder: Path, resume: int = 0, **tracking):
    folder.mkdir(exist_ok=True)
    cfg = config(report=False, tensorboard=False, **tracking)
    return build_tracker(cfg, folder, total_steps=12, resume_step=resume, wandb_run_id=None, is_main=True)


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in NAMES}


@pytest.fixture
def whole(tmp_path) -> dict[str, bytes]:
    """The files of a run that nothing interrupted."""
    run = tracker(tmp_path / "whole")
    train(run, 0, 12)
    run.finish("finished")
    return bytes_of(tmp_path / "whole")


@pytest.mark.parametrize("checkpoint", range(13))
@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_resumed_files_equal_the_uninterrupted_ones(tmp_path, whole, checkpoint, ahead):
    """Killed ``ahead`` steps after the checkpoint: what lies after it is cut off and written again."""
    run = tracker(tmp_path / "run")
    train(run, 0, min(12, checkpoint + ahead))
    run.flush()
    again = tracker(tmp_path / "run", resume=checkpoint)
    train(again, checkpoint + 1 if checkpoint else 0, 12)
    again.finish("finished")
    assert bytes_of(tmp_path / "run") == whole


def test_every_torn_last_line_is_cut(tmp_path, whole, monkeypatch):
    """A kill inside a write leaves any prefix of the file."""
    monkeypatch.setattr(os, "fsync", lambda _: None)  # a thousand of them take half a minute
    path = tmp_path / "metrics.jsonl"
    data = whole["metrics.jsonl"][:400]
    ends = [i + 1 for i, byte in enumerate(data) if byte == ord("\n")]
    for size in range(len(data) + 1):
        path.write_bytes(data[:size])
        complete = sum(end <= size for end in ends)
        kept = cut_back(path, 100)
        assert len(kept) == complete and path.read_bytes() == data[: ends[complete - 1] if complete else 0]


def test_kill_at_random_moments(tmp_path):
    """A real process, killed in full flight: at most the last line is torn, and a resume removes it."""
    code = (
        "import sys; from pathlib import Path; from twinkle_research.tracking.files import RunFiles, plain_row\n"
        "files = RunFiles(Path(sys.argv[1]), 0); print('go', flush=True)\n"
        "for step in range(1, 10**7): files.log_step(plain_row(step, {'loss': 1 / step, 'text': 'x' * 3000}), {'step': step})"
    )
    draw = random.Random(0)
    for number in range(6):
        folder = tmp_path / str(number)
        folder.mkdir()
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        process = subprocess.Popen([sys.executable, "-c", code, str(folder)], env=env, stdout=subprocess.PIPE)
        process.stdout.readline()
        time.sleep(draw.uniform(0.0, 0.1))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        rows = read_rows(folder / "metrics.jsonl")
        assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
        assert cut_back(folder / "metrics.jsonl", 3) == rows[:3] and len(read_rows(folder / "metrics.jsonl")) == min(3, len(rows))


def test_cut_back_is_atomic(tmp_path, whole, monkeypatch):
    """A crash while cutting leaves the old file; the next attempt cuts it."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(whole["metrics.jsonl"])

    def crash(*_):
        raise OSError("power failure")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", crash)
        with pytest.raises(OSError, match="power failure"):
            cut_back(path, 3)
    assert path.read_bytes() == whole["metrics.jsonl"]
    assert [row["step"] for row in cut_back(path, 3)] == [0, 1, 2, 3] == [row["step"] for row in read_rows(path)]


def test_nothing_to_cut_leaves_the_file_alone(tmp_path, whole):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(whole["metrics.jsonl"])
    before = path.stat()
    cut_back(path, 12)
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_damage_before_the_last_line_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": \n{"step": 3}\n')
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl:2"):
        cut_back(path, 3)
    path.write_bytes(b'{"step": 1}\n{"loss": 3}\n{"step": 3}\n')
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl:2.*'step'"):
        cut_back(path, 3)


def test_rows_that_the_checkpoint_has_and_the_file_lacks_are_told(tmp_path, capsys):
    run = tracker(tmp_path / "run")
    train(run, 1, 3)
    run.finish("failed")
    tracker(tmp_path / "run", resume=5).finish("failed")
    assert "lacks steps 4 to 5" in capsys.readouterr().out


# --- rows -----------------------------------------------------------------------------------------------------------


def test_row_is_the_same_bytes_whatever_the_order_of_its_values():
    values = {"eval/loss": 1.5, "tokens": np.int64(7), "b": True, "loss": np.float32(0.5), "a": None, "lr": 1e-5}
    expected = b'{"step": 3, "loss": 0.5, "lr": 1e-05, "tokens": 7, "a": null, "b": true, "eval/loss": 1.5}\n'
    names = list(values)
    for seed in range(5):
        random.Random(seed).shuffle(names)
        assert encode(plain_row(3, {name: values[name] for name in names})) == expected


def test_floats_survive_exactly():
    draw = random.Random(1)
    for _ in range(1000):
        value = draw.uniform(-1, 1) * 10 ** draw.randint(-300, 300)
        assert json.loads(encode(plain_row(1, {"x": value})))["x"] == value


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), np.float32("nan")])
def test_not_finite_is_null(value):
    """NaN is not JSON: a strict reader would refuse the whole file."""
    assert plain_row(1, {"loss": value}) == {"step": 1, "loss": None}


def test_tensors_are_refused_by_name():
    with pytest.raises(TypeError, match="'grad_norm'.*ndarray"):
        plain_row(1, {"grad_norm": np.zeros(2)})


@pytest.mark.parametrize("text", ["é 漢字 🙂", "a\nb\r\n\u2028c\u0085", "lone \ud800 surrogate", "\x00\x1f", '"\\', ""])
def test_any_sampled_text_is_one_line_and_comes_back(tmp_path, text):
    file = JsonLines(tmp_path / "samples.jsonl", 0)
    file.write({"step": 1, "prompt": text, "completion": text})
    file.write({"step": 2})
    file.close()
    assert read_rows(tmp_path / "samples.jsonl") == [{"step": 1, "prompt": text, "completion": text}, {"step": 2}]


def test_steps_must_go_up(tmp_path):
    run = tracker(tmp_path / "run")
    train(run, 1, 3)
    with pytest.raises(ValueError, match="step 3 after step 3"):
        run.log_step(3, {"loss": loss_at(3)})
    run.finish("failed")


def test_samples_keep_their_fields_and_lists(tmp_path):
    run = tracker(tmp_path / "run")
    run.log_samples(2, [{"step": 2, "prompt": [{"role": "user", "content": "hi"}], "completion": "x", "reward": 0.5}])
    run.log_samples(2, [])
    run.finish("finished")
    expected = {"step": 2, "prompt": [{"role": "user", "content": "hi"}], "completion": "x", "reward": 0.5}
    assert read_rows(tmp_path / "run" / "samples.jsonl") == [expected]


def test_other_ranks_write_and_say_nothing(tmp_path, capsys):
    run = build_tracker(config("offline"), tmp_path, total_steps=3, resume_step=0, wandb_run_id="x", is_main=False)
    train(run, 0, 3)
    run.message("hello")
    run.flush()
    run.finish("finished")
    assert list(tmp_path.iterdir()) == [] and capsys.readouterr().out == ""


def test_write_atomic_leaves_no_partial_file(tmp_path):
    write_atomic(tmp_path / "a", b"1")
    write_atomic(tmp_path / "a", b"2")
    assert (tmp_path / "a").read_bytes() == b"2" and [p.name for p in tmp_path.iterdir()] == ["a"]
