"""Invariant 3 on a cluster: whatever ends an attempt, the run ends with the weights and metrics of an undisturbed one."""

from __future__ import annotations

import json

import pytest
from jobs import KINDS, Job, outcome, recorded_by_wandb, steps

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

QUIET = ["tracking.progress=none", "tracking.tensorboard=false", "tracking.report=false", "trainer.eval_every=null"]
SFT = ["model=tiny", "data.sample_prompts=[]", "trainer.batch_size=4", "checkpoint.every=8", "optimizer.eps=1e-5", *QUIET]
GRPO = ["loss=grpo", "sampler=transformers", "sampler.max_tokens=6", "trainer.batch_size=4", "rollout.prompts_per_step=8",
        "rollout.num_generations=4", "trainer.inner_epochs=2", "data.eval_rows=4", "trainer.eval_samples=2",
        "checkpoint.every=3", "optimizer.eps=1e-5", *QUIET]  # fmt: skip
MEGATRON = ["backend=megatron", "backend.tensor_parallel=2"]
KILLS = ("kill_a_rank", "node_lost")  # the others let the ranks save
PRODUCTS = {
    "sft": [*SFT, "trainer.max_steps=40"],
    "sft-megatron": [*SFT, *MEGATRON, "adapter=none", "trainer.max_steps=40"],
    "grpo": [*GRPO, "trainer.max_steps=14"],
    "grpo-megatron": [*GRPO, *MEGATRON, "trainer.max_steps=14"],
}


@pytest.fixture(scope="module")
def undisturbed(cluster, tmp_path_factory):
    """``undisturbed(name, *more)``: the outcome of that run, made once."""
    known: dict[tuple[str, ...], dict[str, str]] = {}

    def of(*words: str) -> dict[str, str]:
        if words not in known:
            job = Job(cluster, tmp_path_factory.mktemp("undisturbed"), list(words), [])
            job.finish()
            assert job.restarts == 0
            known[words] = outcome(job.run_dir)
        return known[words]

    return of


def disturbed(cluster, folder, words: list[str], kinds: list[str], **environment: str) -> Job:
    """The run with one attempt for each of ``kinds``, and a last one that comes to the end."""
    job = Job(cluster, folder, words, [], **environment)
    for kind in kinds:
        # Past the newest checkpoint, so that there are steps to lose, and past what earlier attempts had done.
        job.wait_for_step(max(job.checkpoint(), job.step()) + 2)
        before = job.step()
        job.disturb(kind)
        assert job.checkpoint() >= (0 if kind in KILLS else before), (kind, job.output)
    job.finish()
    return job


def assert_one_wandb_run(job: Job, saved: list[bool]) -> None:
    """One id; each step once and in order; just the attempts that saved are marked as preempting. (One that was killed soon
    after its start may have left nothing.)"""
    ids, found, preempting = recorded_by_wandb(job.run_dir)
    assert len(ids) == 1
    assert found == [step for step in steps(job.run_dir) if step]
    assert sum(preempting) == sum(saved) and not preempting[-1]


def check(cluster, undisturbed, folder, name: str, kinds: list[str]) -> None:
    job = disturbed(cluster, folder, PRODUCTS[name], kinds)
    assert outcome(job.run_dir) == undisturbed(*PRODUCTS[name]), job.output
    assert json.loads((job.run_dir / "status.json").read_text())["state"] == "finished"
    assert_one_wandb_run(job, [kind not in KILLS for kind in kinds])


# What CI runs: each kind of end, each loss and backend. The whole product is for a person: pytest -m slow tests/slurm.
# Behind "cancel", torchrun's agents start the ranks.
COVERING = [
    ("sft", ["time_limit", "node_down", "kill_a_rank", "cancel", "preempt"]),
    ("sft-megatron", ["requeue", "kill_a_rank"]),
    ("grpo", ["preempt", "node_lost"]),
]


@pytest.mark.parametrize("name, kinds", COVERING, ids=[name for name, _ in COVERING])
def test_one_after_the_other(cluster, undisturbed, tmp_path, name, kinds):
    check(cluster, undisturbed, tmp_path, name, kinds)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PRODUCTS)
def test_each_alone(cluster, undisturbed, tmp_path, name, kind):
    check(cluster, undisturbed, tmp_path, name, [kind])
