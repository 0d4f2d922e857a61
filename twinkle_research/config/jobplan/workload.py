"""What a step of a run computes: rows, tokens, micro-batches, passes. Tokens are bounds: rows of the full length allowed."""

from __future__ import annotations

from dataclasses import dataclass

from twinkle_research.advantage.config import AdvantageConfig
from twinkle_research.config.layouts import data_parallel_size
from twinkle_research.loss.config import PREFERENCE_CONFIGS, DPOConfig, KTOPairConfig, PPOConfig
from twinkle_research.model.config import LoraAdapterConfig
from twinkle_research.model.megatron.config import MegatronBackendConfig
from twinkle_research.trainer.config import ReferenceKind, RlTrainerConfig, TrainConfig

NO_REFERENCE, BASE, COPY = "none", "base", "copy"


@dataclass(frozen=True)
class Workload:
    """``units``: rows, or pairs of them, of an optimizer step; ``share``: of a data-parallel share, at most. ``unit_tokens``:
    of one, at most, of which ``trained`` have a label. ``micro_units``: in one pass of a share, ``micro_batches`` passes.
    ``scored``: forward passes over the same rows beside the one that trains. ``rollout_steps``: optimizer steps for each
    rollout, 0 without rollouts."""

    units: int
    shares: int
    share: int
    unit_tokens: int
    trained: int
    micro_units: int
    micro_batches: int
    scored: float
    rollout_steps: float

    @property
    def micro_tokens(self) -> int:
        return self.micro_units * self.unit_tokens

    @property
    def share_tokens(self) -> int:
        """Of a share in a step, in one pass over its rows."""
        return self.share * self.unit_tokens

    @property
    def tokens(self) -> int:
        """Of a step, over all shares."""
        return self.units * self.unit_tokens


def workload(config: TrainConfig, world_size: int) -> Workload:
    trainer, shares = config.trainer, data_parallel_size(config.backend, world_size)
    generations = getattr(config.rollout, "num_generations", 1)
    answer = getattr(config.sampler, "max_tokens", 0)  # of a rollout; given answers are part of data.max_length
    together = 2 if config.data.pairs else 1
    units = trainer.batch_size * generations
    share = -(-units // shares)
    tokens = (config.data.max_length + answer) * together
    micro = min(trainer.micro_batch_size or 1, share)
    if trainer.micro_batch_tokens is not None:
        micro = max(1, min(trainer.micro_batch_tokens // tokens, share))
    rollouts = 0.0
    if isinstance(trainer, RlTrainerConfig):
        rollouts = trainer.inner_epochs * (config.rollout.prompts_per_step or trainer.batch_size) / trainer.batch_size
    passes = -(-share // micro)
    backend = config.backend
    if isinstance(backend, MegatronBackendConfig) and backend.virtual_stages > 1:
        passes += -passes % backend.pipeline_parallel  # interleaved stages want a multiple of their number
    return Workload(units, shares, share, tokens, answer or tokens, micro, passes, _scored(config, rollouts), rollouts)


def _scored(config: TrainConfig, rollouts: float) -> float:
    """Once for the log-probabilities before an update, where the rollout is used more than once, and once by the reference."""
    passes = 1.0 if reference_kind(config) != NO_REFERENCE else 0.0
    if isinstance(config.loss, KTOPairConfig):
        passes += 1
    if isinstance(config.trainer, RlTrainerConfig):
        old = rollouts > 1 or has_critic(config) or _reward_kl(config)
        return (passes + old) / config.trainer.inner_epochs
    return passes


def has_critic(config: TrainConfig) -> bool:
    return isinstance(config.loss, PPOConfig) and config.loss.value_coef > 0


def reference_kind(config: TrainConfig) -> str:
    """What the run compares its policy with: nothing, the model without its adapter, or a copy of what is trained."""
    lora = isinstance(config.adapter, LoraAdapterConfig)
    if isinstance(config.loss, PREFERENCE_CONFIGS):
        compares = isinstance(config.loss, KTOPairConfig) or (
            isinstance(config.loss, DPOConfig) and not config.loss.reference_free
        )
        return (BASE if lora else COPY) if compares else NO_REFERENCE
    if not isinstance(config.trainer, RlTrainerConfig):
        return NO_REFERENCE
    if not (getattr(config.loss, "beta", 0.0) or _reward_kl(config)):
        return NO_REFERENCE
    kind = config.trainer.reference
    if kind is ReferenceKind.auto:
        return BASE if lora else COPY
    return BASE if kind is ReferenceKind.base else COPY


def _reward_kl(config: TrainConfig) -> float:
    return config.advantage.kl_coef if isinstance(config.advantage, AdvantageConfig) else 0.0
