"""Settings of reinforcement runs that contradict each other or have no effect are refused, saying what to write instead."""

import pytest

from twinkle_research.config import compose, to_object, validate
from twinkle_research.config.plan import run_plan
from twinkle_research.errors import ConfigError


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["loss=grpo", "sampler.temperature=0"], "sampler.temperature=0 gives the same answer each time"),  # S12
        (["loss=grpo", "rollout.prompts_per_step=24"], "must be a multiple of trainer.batch_size=16"),
        (["loss=grpo", "rollout.num_generations=1"], "rollout.num_generations must be >= 2"),
        (["loss=reinforce", "rollout.num_generations=1", "rollout.max_oversampling=2"], "as those of one completion always are"),
        (["loss=grpo", "rollout.max_oversampling=2", "trainer.epochs=1"], "give trainer.max_steps and not trainer.epochs"),
        (["loss=grpo", "trainer.reference=frozen"], "'trainer.reference' has no effect without a KL term"),
        (["loss=grpo", "loss.beta=0.1", "trainer.reference=base"], "adapter=none trains all weights; write frozen"),
        (["loss=grpo", "loss.beta=0.1", "trainer.reference=refreshed"], "needs trainer.reference_every"),
        (["loss=grpo", "advantage.kl_coef=0.1", "trainer.reference_every=2"], "without trainer.reference=refreshed"),
        (["loss=grpo", "trainer.eval_samples=2", "data.eval_rows=0"], "'trainer.eval_samples' has no effect"),
        (["loss=grpo", "data=countdown", "data.rows=100"], "write reward=countdown"),
        (
            ["loss=grpo", "loss.correction.mode=tis_token", "loss.correction.low=3"],
            "low=3.0 must be below loss.correction.high=2.0",
        ),
        (["loss=grpo", "loss.correction.mode=icepop", "loss.correction.low=6"], "must be below loss.correction.high=5.0"),
        (["loss=grpo", "data=identity"], "needs prompts with answers that can be checked"),
        (["loss=grpo", "reward=none"], "needs reward=exact, for example"),
        (["reward=exact"], "reward=exact has no effect: loss=cross_entropy is trained on given answers"),
        (["sampler=transformers", "model=tiny"], "sampler=transformers has no effect"),
    ],
)
def test_refusals(words, message):
    with pytest.raises(ConfigError) as refused:
        validate(compose(words))
    assert message in str(refused.value)


def test_an_engine_over_ranks_needs_them():
    config = to_object(compose(["loss=grpo", "sampler=vllm", "sampler.tensor_parallel=2"]))
    with pytest.raises(
        ConfigError, match="the 1 process of a machine: each engine lies in one; write 1, or give launch.nproc_per_node=2"
    ):
        run_plan(config)
    config.launch.nproc_per_node = 2
    assert run_plan(config).world_size == 2
