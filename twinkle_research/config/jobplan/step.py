"""Operations of a step and the least time that they take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twinkle_research.config.jobplan.flow import Flow
from twinkle_research.config.jobplan.memory import Memory
from twinkle_research.config.jobplan.shapes import Widths
from twinkle_research.config.jobplan.workload import Workload
from twinkle_research.distributed.gpus import Hardware
from twinkle_research.model.config import LoraAdapterConfig, TransformersBackendConfig
from twinkle_research.model.facts import Facts
from twinkle_research.model.megatron.config import MegatronBackendConfig, Recompute
from twinkle_research.trainer.config import TrainConfig


@dataclass(frozen=True)
class StepTime:
    """Seconds at best, of an optimizer step: at the GPU's peak, with rows of full length. ``idle``: of a pipeline that fills
    and empties; ``communication``: what passes do not hide; ``sampling``: reading weights and cache for each token."""

    compute: float
    idle: float
    communication: float
    sampling: float

    @property
    def total(self) -> float:
        return self.compute + self.idle + self.communication + self.sampling


def forward_flops(facts: Facts, work: Workload) -> float:
    """Of one unit of rows. Two for each parameter that a token meets, two products of a length's half for each head
    (Kaplan et al. 2020, arXiv:2001.08361), and the vocabulary projection at what is trained."""
    w, tokens = Widths.of(facts), work.unit_tokens
    unused = facts.expert_parameters * (1 - facts.experts_per_token / facts.num_experts) if facts.num_experts else 0
    matrices = facts.parameters - facts.embedding_parameters - unused
    return (
        2 * matrices * tokens
        + facts.num_layers * (w.query + w.output) * tokens**2
        + 2 * facts.vocab_size * w.hidden * work.trained
    )


def step_flops(config: TrainConfig, facts: Facts, work: Workload) -> float:
    """Of all processes: forward once, backward twice (once by frozen weights), what is recomputed and what is scored."""
    passes = (2 if isinstance(config.adapter, LoraAdapterConfig) else 3) + work.scored + _again(config)
    return passes * work.units * forward_flops(facts, work)


def _again(config: TrainConfig) -> int:
    backend = config.backend
    if isinstance(backend, TransformersBackendConfig):
        return int(backend.gradient_checkpointing)
    return int(backend.recompute is Recompute.full)


def idle_share(config: TrainConfig, work: Workload) -> float:
    """Of a step's time in which a pipeline stage waits (Narayanan et al. 2021, arXiv:2104.04473)."""
    backend = config.backend
    if not isinstance(backend, MegatronBackendConfig):
        return 0.0
    waits, works = backend.pipeline_parallel - 1, backend.virtual_stages * work.micro_batches
    return waits / (works + waits)


def step_time(
    config: TrainConfig, facts: Facts, work: Workload, memory: Memory, moved: Sequence[Flow], world_size: int, hardware: Hardware
) -> StepTime:
    busy = work.share * work.shares / work.units  # where shares are not equal the largest one decides
    compute = step_flops(config, facts, work) * busy / world_size / hardware.flops
    waits = idle_share(config, work)
    return StepTime(
        compute,
        compute * waits / (1 - waits),
        sum(flow.seconds(hardware) for flow in moved if not flow.hidden),
        _sampling_seconds(config, work, memory, hardware),
    )


def _sampling_seconds(config: TrainConfig, work: Workload, memory: Memory, hardware: Hardware) -> float:
    """A token of each completion takes all weights of an engine and on average half of what the cache will hold."""
    sampler = memory.sampler
    if not work.rollout_steps or not sampler.wanted:
        return 0.0
    weights = sampler.weights or memory.weights
    per_token = sampler.cache / sampler.tokens if sampler.tokens else 0.0
    waves = max(1.0, sampler.wanted / max(1, sampler.tokens))
    read = waves * weights + sampler.wanted * per_token / 2
    return config.sampler.max_tokens * read / hardware.bandwidth / work.rollout_steps
