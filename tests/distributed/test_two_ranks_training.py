"""The real training on two ranks of our launcher: the update does not depend on how many there are."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from test_launcher import environment, status

from twinkle_research.config.cli import main

# 7 rows in batches of 3: ranks get 2 and 1 rows, and the last batch of an epoch leaves rank 1 without any.
SETTINGS = [
    "model=tiny", "adapter.r=4", "data=jsonl", "data.path=rows.jsonl", "trainer.batch_size=3", "trainer.epochs=null",
    "tracking.tensorboard=false", "tracking.report=false", "tracking.wandb.mode=disabled", "trainer.eval_every=null",
    "checkpoint.every=null",
]  # fmt: skip


def rows_of(folder: Path) -> list[dict]:
    return [row for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()) if row["step"]]


def test_two_ranks_equal_one_and_can_be_continued_by_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"What is {i} plus {i}? ", "completion": f"It is {2 * i}" + "." * i} for i in range(7)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main([*SETTINGS, "run_dir=one", "trainer.max_steps=5"]) == 0

    command = [sys.executable, str(Path(__file__).resolve().parents[2] / "train.py"), *SETTINGS, "run_dir=two"]
    two = subprocess.run(
        [*command, "trainer.max_steps=4", "launch.nproc_per_node=2"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert two.returncode == 0, two.stderr
    assert status(tmp_path / "two")["step"] == 4
    assert main([*SETTINGS, "run_dir=two", "trainer.max_steps=5"]) == 0

    one, both = rows_of(tmp_path / "one"), rows_of(tmp_path / "two")
    assert [row["step"] for row in both] == [1, 2, 3, 4, 5]
    for alone, shared in zip(one, both, strict=True):
        assert shared["tokens"] == alone["tokens"]
        assert shared["loss"] == pytest.approx(alone["loss"], rel=1e-5)
        assert shared["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-4)
