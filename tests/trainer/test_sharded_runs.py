"""Runs of the real command on two ranks with backend.sharding=fsdp2: the same results as one process, exact resume."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from runs import TINY, fingerprint, rows, train_in_child

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
# Full fine-tuning, two epochs of six batches, the last one of three rows; evaluations and answers on the way.
FULL = ["adapter=none", "trainer.epochs=2", "checkpoint.every=1", "checkpoint.keep=20", "data.limit=18", "data.eval_rows=3",
        "trainer.eval_every=4", "data.sample_prompts=['Who are you?']", "trainer.sample_max_tokens=6", "scheduler=cosine",
        "optimizer.eps=1e-5", "optimizer.lr=1e-3"]  # fmt: skip
STEPS = 8  # 15 rows by 4, twice
SHARDED = ["backend.sharding=fsdp2", "launch.nproc_per_node=2"]


def begin(run_dir: Path, *overrides: str) -> subprocess.Popen:
    command = [sys.executable, str(ROOT / "train.py"), *TINY, *overrides, f"run_dir={run_dir}"]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def train(run_dir: Path, *overrides: str, code: int = 0) -> None:
    process = begin(run_dir, *overrides)
    error = process.communicate(timeout=120)[1]
    assert process.returncode == code, error


def wait_for_step(run_dir: Path, step: int) -> None:
    deadline = time.monotonic() + 90
    while not (run_dir / "checkpoints" / f"step-{step:06d}").is_dir():
        assert time.monotonic() < deadline, f"step {step} was not reached"
        time.sleep(0.005)


def pid_of(rank: int, run_dir: Path) -> int:
    """A worker is known by its environment."""
    expected = {f"RANK={rank}".encode(), f"TWINKLE_RUN_DIR={run_dir}".encode()}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # another user's, or gone
            continue
        if expected <= set(variables):
            return int(folder.name)
    raise AssertionError(f"rank {rank} does not run")


def close(found: list[dict], expected: list[dict]) -> None:
    """Gradient norms are a sum over all weights, and Adam has amplified rounding by then."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert value == pytest.approx(other[key], rel=1e-4 if key == "grad_norm" else 1e-5), key


@pytest.fixture(scope="module")
def undisturbed(once):
    return once("sharded-run", lambda run_dir: train(run_dir, *FULL, *SHARDED))


@pytest.fixture(scope="module")
def alone(once):
    """One process, padded."""

    def make(run_dir):
        assert train_in_child(run_dir, *FULL) == 0
        assert [row["step"] for row in rows(run_dir)] == list(range(STEPS + 1))

    return once("run-alone", make)


def test_two_sharded_ranks_equal_one_process(undisturbed, alone):
    """Also in evaluations, and in the answers, for which both ranks generate."""
    close(rows(undisturbed), rows(alone))
    assert {row["step"] for row in rows(undisturbed) if "eval/loss" in row} == {0, 4, 8}
    answers = rows(undisturbed, "samples.jsonl")
    assert [row["step"] for row in answers] == [0, 4, 8] and answers == rows(alone, "samples.jsonl")


def test_packing_changes_nothing(alone, tmp_path):
    assert train_in_child(tmp_path, *FULL, "data.packing=true", "trainer.micro_batch_tokens=200") == 0
    close(rows(tmp_path), rows(alone))
    assert rows(tmp_path, "samples.jsonl") == rows(alone, "samples.jsonl")


def test_one_rank_killed_and_started_again(undisturbed, tmp_path):
    """The same bytes as if nothing had happened: weights, moments, metrics, answers."""
    killed = begin(tmp_path, *FULL, *SHARDED)
    wait_for_step(tmp_path, 3)
    os.kill(pid_of(1, tmp_path), signal.SIGKILL)
    error = killed.communicate(timeout=60)[1]
    assert killed.returncode == 1 and "SIGKILL" in error, error
    assert json.loads((tmp_path / "status.json").read_text())["rank"] == 1
    train(tmp_path, *FULL, *SHARDED)
    assert fingerprint(tmp_path) == fingerprint(undisturbed)


def stopped(run_dir: Path) -> None:
    """By SIGTERM, after step 2: saves and leaves with 75."""
    process = begin(run_dir, *FULL, *SHARDED)
    wait_for_step(run_dir, 2)
    process.send_signal(signal.SIGTERM)
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 75, error
    assert 2 <= rows(run_dir)[-1]["step"] < STEPS


def test_stopped_and_continued_by_one_process_with_packed_rows(alone, tmp_path):
    stopped(tmp_path)
    layout = ["backend.sharding=none", "launch.nproc_per_node=1", "data.packing=true", "trainer.micro_batch_tokens=200"]
    assert train_in_child(tmp_path, *FULL, *layout) == 0
    close(rows(tmp_path), rows(alone))
    assert rows(tmp_path, "samples.jsonl") == rows(alone, "samples.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize("order", [("fsdp2", "ddp"), ("ddp", "fsdp2"), ("none", "fsdp2")], ids="-".join)
def test_continued_under_another_layout(alone, tmp_path, order):
    ends = ["trainer.max_steps=3", "trainer.max_steps=null"]
    fixed = [*FULL, "scheduler.total_steps=8"]
    for sharding, end in zip(order, ends, strict=True):
        train(tmp_path, *fixed, end, f"backend.sharding={sharding}", f"launch.nproc_per_node={1 if sharding == 'none' else 2}")
    close([row for row in rows(tmp_path) if row["step"] != 3], [row for row in rows(alone) if row["step"] != 3])
