"""Invariant 3 for reinforcement runs: stopped or killed at any step, also inside a rollout, and started again, a run ends as
if nothing had happened, bit for bit, its samples included."""

import json
import signal

import pytest
from runs import RL, fingerprint, killed_after, rows, train_in_child

STEPS = 9  # two rollouts and a quarter
RUN = [*RL, "loss.beta=0.05", "trainer.reference=refreshed", "trainer.reference_every=1", "sampler.temperature=1.3",
       "sampler.top_p=0.9", "trainer.eval_every=3", "checkpoint.every=1", "checkpoint.keep=20", f"trainer.max_steps={STEPS}",
       "rollout.max_oversampling=2"]  # fmt: skip
CRITIC = [*RL, "loss=ppo", "loss.beta=0.0", "adapter=lora", "adapter.r=4", "adapter.dropout=0.2", "loss.dropout=replay",
          "checkpoint.every=1", f"trainer.max_steps={STEPS}"]  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    assert train_in_child(run_dir, *RUN) == 0
    return run_dir


def test_the_undisturbed_run(undisturbed):
    """It trains: rewards differ within groups; the reference moves at the second rollout; the ratio is 1 at each first step."""
    found = rows(undisturbed)
    assert [row["step"] for row in found] == list(range(STEPS + 1))
    steps = found[1:]
    assert [row["ratio/max"] == 1.0 for row in steps] == [n % 4 == 0 for n in range(STEPS)]
    assert all(row["grad_norm"] > 0 for row in steps)
    assert steps[3]["kl/mean"] > 0 and steps[4]["kl/mean"] == 0
    assert all(row["sampler_gap/max"] < 1e-5 for row in steps)
    assert [n for n, row in enumerate(steps) if "rollout/prompts" in row] == [0, 4, 8]


# Inside the first inner epoch, between two rollouts, inside the second epoch of the second one.
@pytest.mark.parametrize(
    "step",
    [pytest.param(n, marks=[] if n == 7 else pytest.mark.long if n in (1, 4) else pytest.mark.slow) for n in range(1, STEPS)],
)
def test_killed_after_each_step(undisturbed, tmp_path, step):
    assert train_in_child(tmp_path, *RUN, before=lambda: killed_after(step)) == -signal.SIGKILL
    assert train_in_child(tmp_path, *RUN) == 0
    assert fingerprint(tmp_path) == fingerprint(undisturbed)


def test_the_open_rollout_is_in_the_checkpoint(undisturbed):
    """Token ids, log-probabilities, rewards and advantages, and only where steps are still to be made on it."""
    folder = undisturbed / "checkpoints"
    assert not (folder / "step-000004" / "rollouts").exists()
    for step in (1, 2, 3, 5):
        batch = json.loads((folder / f"step-{step:06d}" / "rollouts" / "open.json").read_text())
        assert batch["done"] == step % 4 and batch["step"] == step - step % 4 and len(batch["completions"]) == 16
        one = batch["completions"][0]
        assert len(one["old_logprobs"]) == len(one["ref_logprobs"]) == len(one["advantages"]) == len(one["logprobs"])


def test_with_critic_adapter_and_dropout(tmp_path):
    assert train_in_child(tmp_path / "whole", *CRITIC) == 0
    assert train_in_child(tmp_path / "killed", *CRITIC, before=lambda: killed_after(6)) == -signal.SIGKILL
    assert train_in_child(tmp_path / "killed", *CRITIC) == 0
    assert fingerprint(tmp_path / "killed") == fingerprint(tmp_path / "whole")
    first = rows(tmp_path / "whole")[1]
    assert abs(first["ratio/max"] - 1) < 1e-5 and first["ratio/clip_high"] == 0  # the masks are replayed
    assert first["value/loss"] > 0


def test_another_seed_gives_other_samples(undisturbed, tmp_path):
    assert train_in_child(tmp_path, *RUN, "seed=1", "trainer.max_steps=1") == 0
    assert (tmp_path / "samples.jsonl").read_bytes() != (undisturbed / "samples.jsonl").read_bytes()
