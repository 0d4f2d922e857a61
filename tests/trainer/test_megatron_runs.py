"""Runs of the real command with backend=megatron, the processes of which share rows: the same results as backend=transformers."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from runs import RL, TINY, rows, train_in_child

from twinkle_research.checkpoint.format import CheckpointReader

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]

ROOT = Path(__file__).resolve().parents[2]
TENSOR = ["backend=megatron", "backend.tensor_parallel=2"]
PIPELINE = ["backend=megatron", "backend.pipeline_parallel=2", "trainer.micro_batch_size=2"]
SFT = [*TINY, "adapter=none", "data.limit=10", "data.eval_rows=3", "trainer.eval_every=2", "optimizer.eps=1e-5"]


def train(run_dir: Path, *words: str) -> None:
    command = [sys.executable, "train.py", *words, f"run_dir={run_dir}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


def assert_same(run_dir: Path, expected: Path) -> None:
    """All that metrics.jsonl says; gradient norms are a sum over all weights."""
    found, wanted = rows(run_dir), rows(expected)
    assert len(found) == len(wanted)
    for row, other in zip(found, wanted, strict=True):
        assert row.keys() == other.keys()
        for name, value in other.items():
            assert row[name] == pytest.approx(value, rel=1e-4, abs=1e-5), (row["step"], name)


def test_supervised_and_continued_by_the_other_backend(tmp_path):
    """No token of the rows that both processes have is counted twice, in losses or evaluations."""
    assert train_in_child(tmp_path / "one", *SFT, "trainer.max_steps=4") == 0
    train(tmp_path / "two", *SFT, *TENSOR, "trainer.max_steps=2")
    manifest = json.loads((tmp_path / "two" / "checkpoints" / "step-000002" / "manifest.json").read_text())
    assert manifest["backend"] == "megatron" and (manifest["layout"]["world_size"], manifest["layout"]["tensor"]) == (2, 2)
    assert train_in_child(tmp_path / "two", *SFT, "trainer.max_steps=4") == 0
    assert_same(tmp_path / "two", tmp_path / "one")


def test_pairs(tmp_path):
    """kto_pair compares with means over all rows of a step."""
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(f'{{"prompt": "{i} + 2 =", "chosen": " {i + 2}", "rejected": " none"}}\n' for i in range(8)))
    words = ["loss=kto_pair", *(word for word in SFT if not word.startswith("data.")), f"data.path={pairs}", "data.eval_rows=2"]
    words += ["trainer.batch_size=3", "trainer.max_steps=2", "trainer.micro_batch_size=2"]
    assert train_in_child(tmp_path / "one", *words) == 0
    train(tmp_path / "two", *words, *PIPELINE)
    assert_same(tmp_path / "two", tmp_path / "one")


def test_rollouts(tmp_path):
    """The sampler deals prompts over processes, the model over its shares: the same tokens, rewards and updates."""
    words = [*RL, "trainer.max_steps=6", "loss.beta=0.05", "checkpoint.every=null"]
    assert train_in_child(tmp_path / "one", *words) == 0
    train(tmp_path / "two", *words, *PIPELINE)
    told, expected = ([row["completion"] for row in rows(tmp_path / name, "samples.jsonl")] for name in ("two", "one"))
    assert told == expected
    assert_same(tmp_path / "two", tmp_path / "one")


def test_sharded_checkpoints(tmp_path):
    """Written in the background by both processes. A run that is continued from one ends as one that was not stopped; the other
    backend continues from it, too."""
    words = [*SFT, *TENSOR, "checkpoint.format=sharded", "checkpoint.background=true", "checkpoint.every=2", "checkpoint.keep=3"]
    train(tmp_path / "one", *words, "trainer.max_steps=6")
    for name in ("two", "three"):  # as they are when the processes die after step 4
        shutil.copytree(tmp_path / "one", tmp_path / name)
        shutil.rmtree(tmp_path / name / "checkpoints" / "step-000006")
        (tmp_path / name / "status.json").unlink()
    train(tmp_path / "two", *words, "trainer.max_steps=6")
    assert rows(tmp_path / "two") == rows(tmp_path / "one")
    files = [CheckpointReader(tmp_path / name / "checkpoints" / "step-000006").manifest.files for name in ("one", "two")]
    assert files[0] == files[1] and "optimizer/optimizer.part-00002-of-00002.safetensors" in files[0]
    assert train_in_child(tmp_path / "three", *SFT, "checkpoint.every=2", "trainer.max_steps=6") == 0
    assert_same(tmp_path / "three", tmp_path / "one")
