"""Reinforcement runs by command: on-policy ratios, many ranks, dynamic sampling, masked and unscored completions."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from runs import RL, rows, train_in_child

ROOT = Path(__file__).resolve().parents[2]
ONE_STEP = [*RL, "rollout.prompts_per_step=2", "trainer.inner_epochs=1", "data.eval_rows=0"]


def samples(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "drawn",
    [
        ["sampler.temperature=0.6"],
        ["sampler.temperature=1.3", "sampler.top_p=0.9"],
        ["sampler.top_k=20", "adapter=lora"],
        ["sampler.temperature=0.6", "sampler.top_k=20", "sampler.top_p=0.9", "adapter=lora"],
    ],
    ids=" ".join,
)
def test_the_trainer_scores_what_was_sampled(tmp_path, drawn):
    """Ratio 1 at every first inner step, and the sampler's log-probabilities are the trainer's, under every distribution."""
    inner = ["trainer.inner_epochs=2", "rollout.prompts_per_step=2", "trainer.max_steps=5", "optimizer.lr=1e-3"]
    assert train_in_child(tmp_path, *RL, *drawn, *inner, "data.eval_rows=0") == 0
    found = rows(tmp_path)
    for n, row in enumerate(found):
        assert row["sampler_gap/max"] < 1e-5
        assert (row["ratio/max"] == 1.0) == (n % 2 == 0)
        assert row["ratio/clip_high"] == row["ratio/clip_low"] == 0.0 or n % 2


@pytest.mark.long
def test_the_gap_stays_flat_without_training(tmp_path):
    assert train_in_child(tmp_path, *ONE_STEP, "optimizer.lr=0", "trainer.max_steps=50", "sampler.temperature=1.3") == 0
    gaps = [row["sampler_gap/mean_abs"] for row in rows(tmp_path)]
    assert len(gaps) == 50 and max(gaps) < 1e-6


@pytest.mark.long
def test_two_ranks_sample_and_train_as_one(tmp_path):
    """The same tokens, the same curve, whatever the layout; also where the model is sharded and all ranks sample together."""
    shared = [*RL, "trainer.max_steps=6", "loss.beta=0.05", "checkpoint.every=null", "trainer.micro_batch_size=3"]
    assert train_in_child(tmp_path / "one", *shared) == 0
    for sharding in ("ddp", "fsdp2"):
        folder = tmp_path / sharding
        command = [sys.executable, "train.py", *shared, f"backend.sharding={sharding}", "launch.nproc_per_node=2"]
        done = subprocess.run([*command, f"run_dir={folder}"], cwd=ROOT, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        told, expected = samples(folder), samples(tmp_path / "one")
        assert [row["completion"] for row in told] == [row["completion"] for row in expected]
        for row, other in zip(rows(folder), rows(tmp_path / "one"), strict=True):
            for name in ("loss", "grad_norm", "reward/mean", "kl/mean", "ratio/mean", "eval/mean@k", "completion/length_mean"):
                if name in other:
                    assert row[name] == pytest.approx(other[name], rel=1e-4, abs=1e-7), (row["step"], name)


def test_s02_truncated_completions_leave_numerator_and_denominator(tmp_path, capfd):
    """Random answers seldom end by themselves: with a limit of 3 all are cut. Lengths are logged as they were."""
    assert train_in_child(tmp_path, *ONE_STEP, "sampler.max_tokens=3", "rollout.mask_truncated=true", "trainer.max_steps=1") == 0
    row = rows(tmp_path)[0]
    assert row["completion/truncated"] == 1.0 and row["completion/length_mean"] == 3.0
    assert row["tokens"] == 0 and row["loss"] == 0.0 and row["grad_norm"] == 0.0
    said = " ".join(capfd.readouterr().out.split())
    assert "completions were cut off at sampler.max_tokens" in said and "rollout.mask_truncated leaves them out" in said


def test_dynamic_sampling_leaves_out_groups_that_say_nothing(tmp_path):
    """With answers of one token most groups of two are flat. The bound holds, further prompts are taken, none twice."""
    few = ["sampler.max_tokens=1", "rollout.num_generations=2", "trainer.batch_size=4", "trainer.max_steps=2"]
    more = ["rollout.prompts_per_step=4", "rollout.max_oversampling=8", "trainer.log_completions=64"]
    assert train_in_child(tmp_path, *RL, *few, *more, "trainer.inner_epochs=1", "data.eval_rows=0") == 0
    found = rows(tmp_path)
    assert all(4 < row["rollout/prompts"] <= 32 for row in found)
    kept = [row for row in samples(tmp_path) if row["step"] == 1]
    assert 0 < len(kept) <= 8 and len({row["prompt"] for row in kept}) == len(kept) / 2
    pairs = [kept[i : i + 2] for i in range(0, len(kept), 2)]
    assert all(len({row["reward"] for row in pair if row["reward"] is not None}) == 2 for pair in pairs)


def test_s05_unscored_completions_are_counted_and_have_no_advantage(tmp_path):
    assert train_in_child(tmp_path, *ONE_STEP, "trainer.max_steps=3", "trainer.log_completions=64") == 0
    found = samples(tmp_path)
    unscored = [row for row in found if row["reward"] is None]
    assert unscored and all(row["advantage"] == 0.0 and row["completion"][:1].isupper() for row in unscored)
    assert sum(row["reward/unscored"] for row in rows(tmp_path)) == len(unscored)


def test_evaluate_only(tmp_path, capfd):
    run = [*RL, "trainer.max_steps=2"]
    assert train_in_child(tmp_path, *run) == 0
    last = rows(tmp_path)[-1]
    assert train_in_child(tmp_path, *run, "eval_only=true") == 0
    measured = json.loads((tmp_path / "evaluation.json").read_text())
    for name in ("eval/accuracy", "eval/mean@k", "eval/pass@k"):
        assert measured[name] == last[name]
