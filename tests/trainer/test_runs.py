"""Whole runs of the tiny model: what a user sees on the disk, and that settings do what they say."""

import json
import math
import os
import re
import signal
import subprocess
import sys

import pytest
from runs import die, fingerprint, rows, train_in_child

from twinkle_research.trainer.loop import TrainingLoop

BASE = ["trainer.max_steps=3", "checkpoint.every=null"]


@pytest.fixture
def own_rows(tmp_path):
    """Six rows in a file of the user's own."""
    path = tmp_path / "rows.jsonl"
    text = [{"messages": [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": str(n)}]} for n in range(6)]
    path.write_text("".join(json.dumps(row) + "\n" for row in text))
    return path


def last_loss(run_dir):
    return [row["loss"] for row in rows(run_dir) if row.get("loss") is not None][-1]


def test_run_folder(tmp_path):
    assert train_in_child(tmp_path, *BASE, "data.eval_rows=2", "tracking.tensorboard=true", "tracking.report=true") == 0
    names = {path.name for path in tmp_path.iterdir()}
    assert names >= {
        "config.yaml",
        "status.json",
        "metrics.jsonl",
        "timing.jsonl",
        "train.log",
        "report.html",
        "checkpoints",
        "logs",
    }
    assert (tmp_path / "checkpoints" / "latest").read_text().strip() == "step-000003"
    metrics = rows(tmp_path)
    assert [row["step"] for row in metrics] == [0, 1, 2, 3]
    assert set(metrics[0]) == {"step", "eval/loss", "eval/perplexity"}
    assert set(metrics[1]) == {"step", "loss", "grad_norm", "lr", "tokens"}
    assert set(metrics[3]) == set(metrics[0]) | set(metrics[1])
    assert metrics[3]["eval/perplexity"] == pytest.approx(math.exp(metrics[3]["eval/loss"]))
    assert all(row["tokens_per_second"] > 0 and row["time/train"] > 0 for row in rows(tmp_path, "timing.jsonl")[-3:])
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["state"], status["step"], status["objective"]) == ("finished", 3, metrics[3]["eval/loss"])


def test_a_finished_run_says_so_and_goes_on_when_asked(tmp_path, capfd):
    assert train_in_child(tmp_path, *BASE) == 0
    before = fingerprint(tmp_path)
    capfd.readouterr()
    assert train_in_child(tmp_path, *BASE) == 0
    assert "finished" in capfd.readouterr().out
    assert fingerprint(tmp_path) == before
    assert train_in_child(tmp_path, "trainer.max_steps=5", "checkpoint.every=null") == 0
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4, 5]


def test_another_setting_is_refused_by_name(tmp_path, capfd):
    assert train_in_child(tmp_path, *BASE) == 0
    assert train_in_child(tmp_path, "trainer.max_steps=5", "checkpoint.every=null", "optimizer.lr=1e-2") == 2
    assert "optimizer.lr" in capfd.readouterr().err


def test_a_model_is_looked_at_when_it_is_here(tmp_path, capfd):
    """As one from a hub, of which the plan knew nothing."""
    assert train_in_child(tmp_path / "a", *BASE, "data.max_length=2000") == 2
    assert train_in_child(tmp_path / "b", *BASE, "backend=megatron", "backend.virtual_stages=3") == 2
    told = capfd.readouterr().err
    assert "data.max_length=2000 is more than the 1024 positions" in told and "backend.virtual_stages=3 must divide" in told


def test_resume_from_the_checkpoint_of_another_run(tmp_path):
    """`resume=<path>` goes on with weights, optimizer and data position, in a folder and a record of its own."""
    assert train_in_child(tmp_path / "first", "trainer.max_steps=2") == 0
    assert train_in_child(tmp_path / "whole", "trainer.max_steps=4") == 0
    assert train_in_child(tmp_path / "second", "trainer.max_steps=4", f"resume={tmp_path / 'first'}") == 0
    assert rows(tmp_path / "second") == rows(tmp_path / "whole")[2:]
    assert rows(tmp_path / "first")[-1]["step"] == 2


def test_changed_data_is_refused_or_started_again(tmp_path, own_rows, capfd):
    run = ["data=jsonl", f"data.path={own_rows}", "trainer.batch_size=2", *BASE]
    assert train_in_child(tmp_path / "run", *run) == 0
    with own_rows.open("a") as file:
        file.write('{"prompt": "and", "completion": "more"}\n')
    longer = [*run, "trainer.max_steps=4"]
    assert train_in_child(tmp_path / "run", *longer) == 1
    assert "data.on_change=restart" in capfd.readouterr().err
    assert train_in_child(tmp_path / "run", *longer, "data.on_change=restart") == 0
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3, 4]


def test_eval_only_measures_and_changes_nothing(tmp_path, capfd):
    run = [*BASE, "data.eval_rows=4"]
    assert train_in_child(tmp_path, *run) == 0
    before = fingerprint(tmp_path)
    capfd.readouterr()
    assert train_in_child(tmp_path, *run, "eval_only=true") == 0
    measured = json.loads(re.search(r"\{.*?\}", capfd.readouterr().out, re.DOTALL).group())
    assert measured["eval/loss"] == rows(tmp_path)[-1]["eval/loss"]
    assert json.loads((tmp_path / "evaluation.json").read_text())["step"] == 3
    assert fingerprint(tmp_path) == before


def test_a_bad_row_is_named_or_skipped(tmp_path, own_rows, capfd):
    with own_rows.open("a") as file:
        file.write('\n{"messages": []}\n')
    run = ["data=jsonl", f"data.path={own_rows}", *BASE]
    assert train_in_child(tmp_path / "a", *run) == 1
    assert f"{own_rows}:8" in capfd.readouterr().err
    assert train_in_child(tmp_path / "b", *run, "data.on_error=skip") == 0


def test_a_batch_larger_than_the_data_is_remarked(tmp_path, own_rows, capfd):
    assert train_in_child(tmp_path / "run", "data=jsonl", f"data.path={own_rows}", "trainer.batch_size=64", *BASE) == 0
    assert "trainer.batch_size=64 is more than the 6 rows" in capfd.readouterr().out


def test_preview_marks_the_trained_tokens(tmp_path, own_rows, capfd):
    assert train_in_child(tmp_path / "run", "data=jsonl", f"data.path={own_rows}", "data.preview=2", *BASE) == 0
    shown = capfd.readouterr().out
    assert f"{own_rows}:1" in shown and f"{own_rows}:2" in shown and f"{own_rows}:3" not in shown


def poison(step):
    """In a child: the weights' gradients of this step are not finite."""
    from twinkle_research.loss.cross_entropy import CrossEntropyLoss

    inner, calls = CrossEntropyLoss.__call__, []

    def call(self, scores, inputs, normalizer):
        output = inner(self, scores, inputs, normalizer)
        calls.append(1)
        if len(calls) == step:
            output.loss = output.loss * float("nan")
            output.sequence_losses[1] = float("nan")
        return output

    CrossEntropyLoss.__call__ = call


def test_nan_stops_the_run_naming_the_row(tmp_path, own_rows, capfd):
    run = ["data=jsonl", f"data.path={own_rows}", "data.shuffle=false", "trainer.batch_size=3", *BASE]
    assert train_in_child(tmp_path / "run", *run, before=lambda: poison(2)) == 1
    message = capfd.readouterr().err
    assert f"{own_rows}:5" in message and f"{own_rows}:4" not in message
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "failed"


def test_nan_skips_the_step_and_counts_it(tmp_path, own_rows):
    run = ["data=jsonl", f"data.path={own_rows}", "trainer.batch_size=3", "trainer.on_nan=skip", *BASE]
    assert train_in_child(tmp_path / "run", *run, before=lambda: poison(2)) == 0
    metrics = rows(tmp_path / "run")
    assert [row["skipped_steps"] for row in metrics] == [0, 1, 1]
    assert metrics[1]["loss"] is None and math.isfinite(metrics[2]["loss"])


@pytest.mark.parametrize("adapter", ["lora", "none"])
def test_two_processes_equal_one(tmp_path, adapter):
    """Invariant 1 through the whole command: seven rows a step over two ranks, a short last batch, an evaluation."""
    run = [f"adapter={adapter}", "trainer.batch_size=7", "trainer.epochs=1", "data.eval_rows=3"]
    run += ["adapter.dropout=0.1"] if adapter == "lora" else []
    assert train_in_child(tmp_path / "one", *run) == 0
    assert train_in_child(tmp_path / "two", *run, "launch.nproc_per_node=2") == 0
    for one, two in zip(rows(tmp_path / "one"), rows(tmp_path / "two"), strict=True):
        assert one.keys() == two.keys()
        for name in one:
            assert two[name] == pytest.approx(one[name], rel=1e-5), (name, one["step"])
    assert {path.name for path in tmp_path.iterdir()} == {"one", "two"}


def test_micro_batches_change_nothing(tmp_path):
    metrics = []
    for cut in ("micro_batch_size=1", "micro_batch_size=3", "micro_batch_size=null", "micro_batch_tokens=150"):
        assert train_in_child(tmp_path / cut, f"trainer.{cut}", *BASE) == 0
        metrics.append(rows(tmp_path / cut))
    for number, cut in enumerate((["data.packing=true"], ["data.packing=true", "trainer.micro_batch_tokens=150"])):
        assert train_in_child(tmp_path / f"packed-{number}", *cut, *BASE) == 0
        metrics.append(rows(tmp_path / f"packed-{number}"))
    for other in metrics:
        assert other == [pytest.approx(row, rel=1e-6) for row in metrics[0]]


def test_resume_on_another_number_of_processes(tmp_path):
    run = ["trainer.max_steps=6", "data.eval_rows=2"]
    assert train_in_child(tmp_path / "whole", *run) == 0
    assert train_in_child(tmp_path / "run", "trainer.max_steps=3", "data.eval_rows=2") == 0
    assert train_in_child(tmp_path / "run", *run, "launch.nproc_per_node=2") == 0
    for whole, resumed in zip(rows(tmp_path / "whole")[4:], rows(tmp_path / "run")[4:], strict=True):
        assert resumed["loss"] == pytest.approx(whole["loss"], rel=1e-5)


def test_the_reader_of_the_output_may_leave(tmp_path):
    """`python train.py ... | head -1`: the run goes on to its end, and its log has every line."""
    read, write = os.pipe()
    os.close(read)

    def into_the_closed_pipe():
        os.dup2(write, 1)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)

    assert train_in_child(tmp_path, *BASE, "tracking.progress=plain", before=into_the_closed_pipe) == 0
    os.close(write)
    assert "step 3/3" in (tmp_path / "train.log").read_text()
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3]


def test_remarks_on_how_a_run_continues(tmp_path, capfd):
    """What would surprise is said: a decay that moves with the end, a `resume` without effect, a lost first attempt."""
    linear = ["scheduler=linear", "checkpoint.every=null"]
    assert train_in_child(tmp_path / "run", *linear, "trainer.max_steps=2") == 0
    assert "lr jumps" not in capfd.readouterr().out
    assert train_in_child(tmp_path / "run", *linear, "trainer.max_steps=4", f"resume={tmp_path / 'run'}") == 0
    shown = capfd.readouterr().out
    assert "ends at step 4 instead of 2" in shown and "resume=" in shown and "is not used" in shown
    assert train_in_child(tmp_path / "killed", *BASE, before=killed_in_step_two) == -signal.SIGKILL
    assert train_in_child(tmp_path / "killed", *BASE) == 0
    assert "reached step 1 without a checkpoint" in capfd.readouterr().out


def test_a_run_that_starts_from_another_says_what_differs(tmp_path, capfd):
    assert train_in_child(tmp_path / "first", *BASE) == 0
    start = [*BASE, f"resume={tmp_path / 'first'}"]
    capfd.readouterr()
    assert train_in_child(tmp_path / "other", *start, "trainer.max_steps=4", "optimizer.lr=0.25") == 0
    assert (
        "settings that differ from those of that run: optimizer.lr 0.0005 -> 0.25, trainer.max_steps 3 -> 4"
        in capfd.readouterr().out
    )
    assert [row["step"] for row in rows(tmp_path / "other")] == [4]
    assert train_in_child(tmp_path / "none", *start) != 0  # it ends where the other one is
    assert "is at step 3 already, and this run ends at step 3" in capfd.readouterr().err


def killed_in_step_two():
    inner = TrainingLoop.optimize
    TrainingLoop.optimize = lambda self, features: die() if self.step == 1 else inner(self, features)


def test_a_dry_run_shows_the_preview(root, own_rows):
    command = [sys.executable, "train.py", "model=tiny", "data=jsonl", f"data.path={own_rows}", "data.preview=1", "dry_run=true"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    assert "⟦0<|im_end|>⟧" in done.stdout and "nothing was started" in done.stdout
