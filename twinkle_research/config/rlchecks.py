"""What a reinforcement run needs from the rest of the config, and what has no effect in it."""

from collections.abc import Iterator

from twinkle_research.advantage.config import AdvantageConfig
from twinkle_research.config.layouts import beside
from twinkle_research.dataset.config import TASKS, eval_path_of
from twinkle_research.model.config import LoraAdapterConfig
from twinkle_research.trainer.config import NoneConfig, ReferenceKind, RlTrainerConfig, TrainConfig

# Groups that a reinforcement run needs and a supervised one has no use for.
_GROUPS = {"rollout": "single", "sampler": "auto", "advantage": "grpo", "reward": "exact"}


def rl_problems(config: TrainConfig) -> Iterator[str]:
    reinforced = isinstance(config.trainer, RlTrainerConfig)
    absent = [group for group in _GROUPS if isinstance(getattr(config, group), NoneConfig)]
    if not reinforced:
        for group in _GROUPS:
            if group not in absent:
                yield f"{group}={getattr(config, group).name} has no effect: loss={config.loss.name} is trained on given answers"
        return
    for group in absent:
        yield f"loss={config.loss.name} samples its own answers and needs {group}={_GROUPS[group]}, for example"
    if not isinstance(config.data, TASKS):
        yield (
            f"loss={config.loss.name} needs prompts with answers that can be checked, which data={config.data.name} does not "
            "give; write data=prompts, data=gsm8k, data=math, data=sums, data=countdown or data=reasoning_gym"
        )
    if not absent:
        yield from _steps(config)
        yield from _reference(config)
        yield from _data(config)


def _steps(config: TrainConfig) -> Iterator[str]:
    trainer, rollout = config.trainer, config.rollout
    if rollout.prompts_per_step is not None and rollout.prompts_per_step % trainer.batch_size:
        yield (
            f"rollout.prompts_per_step={rollout.prompts_per_step} must be a multiple of trainer.batch_size={trainer.batch_size}: "
            f"a rollout is cut into whole optimizer steps; write {beside(rollout.prompts_per_step, trainer.batch_size)}"
        )
    if rollout.max_oversampling is not None and (trainer.epochs is not None or trainer.max_steps is None):
        yield "rollout.max_oversampling samples as many prompts as it needs, so give trainer.max_steps and not trainer.epochs"
    if rollout.num_generations == 1 and config.advantage.name in ("grpo", "dr_grpo", "rloo", "opo"):
        yield f"advantage={config.advantage.name} compares the answers to one prompt: rollout.num_generations must be >= 2"
    if rollout.num_generations == 1 and rollout.max_oversampling is not None:
        yield "rollout.max_oversampling leaves out groups whose rewards are all equal, as those of one completion always are"
    if config.sampler.temperature == 0:
        yield "sampler.temperature=0 gives the same answer each time, so there is nothing to compare; it must be > 0"


def kl_weight(config: TrainConfig) -> float:
    """Of the KL to the reference, in the loss or in the reward."""
    beta = getattr(config.loss, "beta", 0.0)
    return beta + (config.advantage.kl_coef if isinstance(config.advantage, AdvantageConfig) else 0.0)


def _reference(config: TrainConfig) -> Iterator[str]:
    trainer = config.trainer
    if not kl_weight(config):
        for key, default in (("reference", ReferenceKind.auto), ("reference_every", None)):
            if getattr(trainer, key) != default:
                yield f"'trainer.{key}' has no effect without a KL term: give loss.beta or advantage.kl_coef"
        return
    if trainer.reference is ReferenceKind.base and not isinstance(config.adapter, LoraAdapterConfig):
        yield "trainer.reference=base is the model without its adapter, but adapter=none trains all weights; write frozen"
    refreshed = trainer.reference is ReferenceKind.refreshed
    if refreshed and trainer.reference_every is None:
        yield "trainer.reference=refreshed needs trainer.reference_every: after how many rollouts it follows the policy"
    if trainer.reference_every is not None and not refreshed:
        yield "'trainer.reference_every' has no effect without trainer.reference=refreshed"


def _data(config: TrainConfig) -> Iterator[str]:
    data = config.data
    if data.sample_prompts:
        yield "'data.sample_prompts' has no effect in a reinforcement run, which answers held-out prompts: give data.eval_rows"
    if config.data.name == "countdown" and config.reward.name == "exact":
        yield "data=countdown has many right answers, and reward=exact knows one of them; write reward=countdown"
    if not data.eval_rows and not eval_path_of(data) and config.trainer.eval_samples != RlTrainerConfig().eval_samples:
        yield "'trainer.eval_samples' has no effect without held-out prompts: give data.eval_rows or data.eval_path"
    if data.preview:
        yield "'data.preview' shows what a supervised run trains; the samples of this run are in samples.jsonl"
