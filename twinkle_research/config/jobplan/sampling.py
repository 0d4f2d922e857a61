"""Memory of what samples, on the devices that train."""

from __future__ import annotations

from dataclasses import dataclass

from twinkle_research.config.jobplan.activations import bytes_each
from twinkle_research.distributed.gpus import GIB, Hardware, gib
from twinkle_research.model.facts import Facts
from twinkle_research.model.megatron.config import MegatronBackendConfig
from twinkle_research.sampler.choice import chosen_sampler
from twinkle_research.sampler.config import (
    EngineDType,
    SamplerConfig,
    SleepMode,
    TransformersSamplerConfig,
    VLLMSamplerConfig,
    vllm_config,
)
from twinkle_research.sampler.kv_cache import bytes_per_token, cpu_cache_bytes
from twinkle_research.trainer.config import TrainConfig

_BATCHED_TOKENS = 8192  # that vLLM takes through the model at a time, by default
_GRAPHS = int(0.7 * GIB)  # CUDA graphs and what an engine keeps when it sleeps: an allowance


@dataclass(frozen=True)
class SamplingMemory:
    """Bytes: ``weights`` of the sampler's own, ``cache`` of keys and values, ``workspace`` of passes; ``tokens`` that the cache
    has room for, of ``wanted`` (all completions of full length that are in the making at one time). ``asleep``: what of it
    stays while the model trains."""

    weights: int = 0
    cache: int = 0
    workspace: int = 0
    asleep: int = 0
    tokens: int = 0
    wanted: int = 0

    @property
    def awake(self) -> int:
        return max(self.weights + max(self.cache, 0) + self.workspace, self.asleep)

    def text(self) -> str:
        if not self.wanted:
            return f"with a whole copy of the model {gib(self.weights)}, for data.sample_prompts"
        own = f"its weights {gib(self.weights)}, " if self.weights else ""
        share = f", {self.tokens / self.wanted:.0%} of all completions at one time" if self.tokens < self.wanted else ""
        return f"{own}KV cache {gib(max(self.cache, 0))} for {self.tokens:,} tokens{share}"


def sampling_memory(
    config: TrainConfig, facts: Facts, world_size: int, hardware: Hardware | None, *, on_cpu: bool
) -> SamplingMemory:
    sampler = config.sampler
    if not isinstance(sampler, SamplerConfig):
        copied = isinstance(config.backend, MegatronBackendConfig) and config.data.sample_prompts
        weights = facts.parameters * bytes_each(config) if copied else 0
        return SamplingMemory(weights, asleep=weights)
    rows = config.trainer.batch_size if config.rollout.prompts_per_step is None else config.rollout.prompts_per_step
    rows *= config.rollout.num_generations
    if chosen_sampler(sampler, facts, on_cpu).name == "vllm":
        return _vllm(config, vllm_config(sampler), facts, world_size, rows, hardware, on_cpu)
    return _by_itself(config, facts, -(-rows // world_size))


def _by_itself(config: TrainConfig, facts: Facts, rows: int) -> SamplingMemory:
    """The model that trains; Megatron-Core's layers keep no cache, so there each process has a copy, whole."""
    size, sampler = bytes_each(config), config.sampler
    limit = sampler.max_rows if isinstance(sampler, TransformersSamplerConfig) else TransformersSamplerConfig().max_rows
    tokens = min(rows, limit) * (config.data.max_length + sampler.max_tokens)
    weights = facts.parameters * size if isinstance(config.backend, MegatronBackendConfig) else 0
    return SamplingMemory(weights, tokens * bytes_per_token(facts, size), asleep=weights, tokens=tokens, wanted=tokens)


def _vllm(
    config: TrainConfig, sampler: VLLMSamplerConfig, facts: Facts, world_size: int, rows: int, hardware: Hardware | None,
    on_cpu: bool,
) -> SamplingMemory:  # fmt: skip
    together = sampler.tensor_parallel
    size = bytes_each(config) if sampler.dtype is EngineDType.auto else (2 if sampler.dtype is EngineDType.bfloat16 else 4)
    weights, per_token = -(-facts.parameters // together) * size, bytes_per_token(facts, size, together)
    making = min(-(-rows * together // world_size), sampler.max_num_seqs)
    wanted = making * (config.data.max_length + sampler.max_tokens)
    workspace = 0
    if not on_cpu:
        width = max(facts.intermediate_size, facts.experts_per_token * facts.expert_intermediate_size) / together
        layer = _BATCHED_TOKENS * size * (3 * width + 6 * facts.hidden_size)
        workspace = int(max(layer, 3 * 4 * min(making, sampler.max_num_seqs) * facts.vocab_size))
        workspace += 0 if sampler.enforce_eager else _GRAPHS
    if sampler.kv_cache_gib is not None:
        cache = int(sampler.kv_cache_gib * GIB)
    elif on_cpu:
        cache = cpu_cache_bytes(
            facts, size, tensor_parallel=together, max_model_len=sampler.max_model_len, max_num_seqs=sampler.max_num_seqs,
            expected_tokens=sampler.max_tokens,
        )  # fmt: skip
    elif hardware is not None:
        cache = int(sampler.gpu_memory_utilization * hardware.memory) - weights - workspace
    else:
        cache = wanted * per_token  # what would do
    tokens = max(cache, 0) // per_token if per_token else wanted  # not known, of an architecture of another kind
    stays = 0 if on_cpu else _GRAPHS
    if on_cpu or sampler.sleep is SleepMode.none:
        stays = weights + max(cache, 0) + workspace
    return SamplingMemory(weights, cache, workspace, stays, tokens, wanted)
