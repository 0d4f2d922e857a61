"""``resume=<another run>``, checked before anything is started; and other words that were refused without saying enough."""

import json
from pathlib import Path

import pytest
import torch

from twinkle_research.checkpoint.__main__ import main as checkpoint
from twinkle_research.checkpoint.format import CheckpointWriter, TensorSpec
from twinkle_research.config import compose, to_object
from twinkle_research.config.cli import main
from twinkle_research.config.startchecks import differences, problems_of_start, run_of
from twinkle_research.config.storage import save_config
from twinkle_research.tracking.rundata import find_runs

WORDS = ["model=tiny", "trainer.max_steps=20"]


def make_run(folder: Path, part: str, *words: str, step: int = 8) -> Path:
    save_config(compose([*WORDS, *words]), folder)
    with CheckpointWriter(folder / "checkpoints", f"step-{step:06d}", step=step, backend="transformers", layout={}) as writer:
        weights = {"w": torch.zeros(2)}
        writer.add_tensors(part, [TensorSpec.of("w", weights["w"])], weights.items())
        writer.add_json("trainer_state.json", {"step": step})
    return folder


@pytest.fixture(scope="module")
def lora(tmp_path_factory) -> Path:
    return make_run(tmp_path_factory.mktemp("lora"), "adapter", "adapter.r=4")


def problems(resume: Path, *words: str) -> list[str]:
    return list(problems_of_start(to_object(compose([*WORDS, f"resume={resume}", *words]))))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["adapter=none"], "holds an adapter, but adapter=none; write adapter=lora"),
        (["adapter.r=8"], "has 'adapter.r' 4, not 8"),
        (["adapter.r=4", "adapter.target_modules=[q_proj]"], "has 'adapter.target_modules' ['all-linear'], not ['q_proj']"),
        (["adapter.r=4", "trainer.max_steps=3"], "is at step 8 already, and trainer.max_steps=3"),
        (["adapter.r=4", "trainer.max_steps=8"], "is at step 8 already"),
        (["adapter.r=4", "optimizer=sgd"], "optimizer=adamw, whose state optimizer=sgd cannot continue. To start from"),
    ],
)
def test_a_start_that_cannot_be(lora: Path, words: list[str], message: str) -> None:
    (problem,) = problems(lora, *words)
    assert message in problem
    assert problems(lora / "checkpoints" / "step-000008", *words) == [problem]


def test_starts_that_can_be(lora: Path, tmp_path: Path) -> None:
    assert problems(lora, "adapter.r=4") == problems(lora, "adapter.r=4", "optimizer=adam", "optimizer.lr=1") == []
    whole = make_run(tmp_path / "whole", "model", "adapter=none")
    assert "holds a whole model, but adapter=lora; write adapter=none" in problems(whole)[0]
    assert problems(whole, "adapter=none") == []
    (tmp_path / "own").mkdir()
    assert problems(tmp_path / "own", "adapter=none") == [f"resume={tmp_path / 'own'}: there is no finished checkpoint in it"]
    save_config(compose(WORDS), tmp_path / "own")  # a run that has begun continues from its own checkpoints
    assert problems(lora, "adapter=none", f"run_dir={tmp_path / 'own'}") == []


def test_what_differs_is_listed(lora: Path, tmp_path: Path) -> None:
    config = to_object(
        compose(["model=tiny", "adapter.r=4", "seed=5", "optimizer.lr=0.5", "trainer.max_steps=20", "launch.threads=1"])
    )
    changed = differences(lora / "checkpoints" / "step-000008", config)
    assert changed == ["optimizer.lr 0.0005 -> 0.5", "seed 0 -> 5"]
    assert run_of(tmp_path) is None and differences(tmp_path, config) == []


@pytest.mark.parametrize(
    ("flags", "answer"),
    [
        (["--dry-run"], "write dry_run=true"),
        (["--run-dir", "x"], "write run_dir=..."),
        (["--max-steps=3"], "write trainer.max_steps=..."),
        (["--data", "x"], "write data=..."),
        (["--multi-run"], "did you mean '--multirun'"),
    ],
)
def test_flags_with_dashes(flags: list[str], answer: str, capsys: pytest.CaptureFixture) -> None:
    assert main(flags) == 2
    assert answer in capsys.readouterr().err


def rows(path: Path, count: int) -> Path:
    path.write_text(f"{json.dumps({'prompt': 'a', 'completion': 'b'})}\n" * count + "\n")
    return path


def test_held_out_rows_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = rows(tmp_path / "rows.jsonl", 60)
    words = ["model=tiny", "data=jsonl", f"data.path={path}", "dry_run=true"]
    assert main([*words, "data.eval_rows=60"]) == 2
    assert f"data.eval_rows=60 leaves no row to train on: {path} has 60 rows" in capsys.readouterr().err
    assert main([*words, "data.eval_rows=59", "trainer.micro_batch_tokens=10", "trainer.micro_batch_size=null"]) == 0
    assert "a longer row is one of its own" in " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_what_an_experiment_sets_is_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    words = ["experiment=own_data", "model=tiny", f"data.path={rows(tmp_path / 'rows.jsonl', 60)}", "dry_run=true"]
    assert main([*words, "trainer.max_steps=4"]) == 2
    said = capsys.readouterr().err
    assert "scheduler.warmup_steps=5 is longer" in said and "scheduler.warmup_steps=5 comes from experiment=own_data" in said
    assert main([*words, "trainer.max_steps=4", "scheduler.warmup_steps=6"]) == 2
    assert "comes from" not in capsys.readouterr().err


def test_a_refused_sweep_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["-m", "model=tiny", "adapter.r=8,0"]) == 2
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "note").touch()
    assert main(["-m", "model=tiny", "adapter.r=8,0", "hydra.sweep.dir=kept"]) == 2
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["kept", "multirun.yaml", "note"]


def test_runs_are_found_below_a_folder_of_sweeps(tmp_path: Path) -> None:
    for name in ("sweeps/b/10", "sweeps/b/9", "sweeps/a/0", "sweeps/alone"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "metrics.jsonl").touch()
    found = [str(path.relative_to(tmp_path.resolve())) for path in find_runs([tmp_path / "sweeps"])]
    assert found == ["sweeps/alone", "sweeps/a/0", "sweeps/b/9", "sweeps/b/10"]


def test_inspecting_a_run_without_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "checkpoints").mkdir()
    assert checkpoint(["inspect", str(tmp_path)]) == 1
    shown = capsys.readouterr()
    assert shown.err == f"error: {tmp_path / 'checkpoints'}: there is no checkpoint\n" and shown.out == ""
