"""Estimate of a process's memory in training, from dimensions alone."""

import os
from dataclasses import dataclass
from pathlib import Path

from twinkle_research.model.config import DType, LoraAdapterConfig, NoAdapterConfig, Sharding
from twinkle_research.model.facts import ALL_LINEAR, Facts
from twinkle_research.model.megatron.config import (
    MegatronBackendConfig,
    Recompute,
    expert_processes,
    expert_tensor_parallel,
)
from twinkle_research.sampler.choice import chosen_sampler
from twinkle_research.sampler.config import SamplerConfig
from twinkle_research.trainer.config import AdamConfig, MuonConfig, SgdConfig, TrainConfig

GIB = 2**30
_RUNTIME = 0.6 * GIB  # Python, torch and its libraries


@dataclass(frozen=True)
class Memory:
    """Bytes of one process, with the longest rows that the config allows."""

    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        return int(self.weights + self.gradients + self.optimizer + self.activations + _RUNTIME)

    def text(self) -> str:
        parts = [(name, getattr(self, name)) for name in ("weights", "gradients", "optimizer", "activations")]
        shown = ", ".join(f"{name} {_gib(size)}" for name, size in parts)
        return f"at most about {self.total / GIB:.1f} GiB a process (rows of full length: {shown})"


def _gib(size: float) -> str:
    return f"{size / GIB:.2f}" if size >= 0.005 * GIB else "< 0.01"


def trainable_parameters(adapter: NoAdapterConfig | LoraAdapterConfig, facts: Facts) -> int:
    """Exact for full fine-tuning and for all-linear; for named layers their share of all-linear."""
    if not isinstance(adapter, LoraAdapterConfig):
        return facts.parameters
    trained = sum(adapter.r * (rows + columns) + (rows if adapter.dora else 0) for rows, columns in facts.linear_shapes)
    if ALL_LINEAR not in adapter.target_modules:
        found = {name for target in adapter.target_modules for name in facts.matching(target)}
        matched = [name for name in found if "experts" not in name.split(".")]  # they are no linear modules in memory
        trained = trained * len(matched) // max(1, len(facts.linear_shapes))
    return trained


def estimate(config: TrainConfig, facts: Facts, world_size: int = 1, on_cpu: bool = True) -> Memory:
    """Weights, gradients and optimizer state are exact up to small buffers; activations count what a Llama-like layer
    keeps for its backward pass with fused attention, fitted to the peaks of SmolLM2-135M (LoRA and full) on a CPU."""
    if isinstance(config.backend, MegatronBackendConfig):
        return _megatron(config, config.backend, facts, world_size, on_cpu)
    size = _bytes_each(config)
    lora = isinstance(config.adapter, LoraAdapterConfig)
    trained = trainable_parameters(config.adapter, facts)
    weights = facts.parameters * size + (4 * trained if lora else 0)
    gradients, optimizer = 4 * trained, _optimizer_bytes(config, facts, trained)
    if config.backend.sharding is Sharding.fsdp2:
        # A process has its part of all this, and whole: embeddings, one layer at work and one on its way. An adapter is not
        # split. Weights that are trained are kept in float32 and need no further master.
        layer = (facts.parameters - facts.embedding_parameters) // max(1, facts.num_layers)
        whole = size * (facts.embedding_parameters + 2 * layer)
        if lora:
            weights = facts.parameters * size // world_size + 4 * trained + whole
        else:
            masters = 4 * trained if size == 2 else 0
            weights = 4 * facts.parameters // world_size + whole
            gradients, optimizer = gradients // world_size, (optimizer - masters) // world_size
    layer = _layer_values(config, facts)
    again = config.backend.gradient_checkpointing
    kept = facts.hidden_size * facts.num_layers + layer if again else layer * facts.num_layers
    return Memory(weights, gradients, optimizer, _activation_bytes(config, facts, kept))


def _megatron(config: TrainConfig, backend: MegatronBackendConfig, facts: Facts, world_size: int, on_cpu: bool) -> Memory:
    """Of the process that has most. Norms count as split, which they are not: they are small."""
    size, lora = _bytes_each(config), isinstance(config.adapter, LoraAdapterConfig)
    tensor, stages = backend.tensor_parallel, backend.pipeline_parallel
    matrix = facts.embedding_parameters // (1 if facts.tied_embeddings else 2)
    edges = facts.embedding_parameters if stages == 1 else matrix  # the first stage embeds, the last one projects
    inner = facts.parameters - facts.embedding_parameters - facts.expert_parameters
    shared, experts = (inner // stages + edges) // tensor, facts.expert_parameters // expert_processes(backend)
    if lora:  # a factor of each pair is on every tensor-parallel process whole
        trained, trained_experts = trainable_parameters(config.adapter, facts) // stages, 0
    else:
        trained, trained_experts = shared, experts
    parts = (trained, world_size // (tensor * stages)), (trained_experts, world_size // expert_processes(backend))
    # Context-parallel processes hold the same weights, so what is split over copies is split over them, too.
    kept = [count // max(1, copies) if backend.distributed_optimizer else count for count, copies in parts]
    both = trained + trained_experts
    copied = facts.parameters if _generates_itself(config, facts, on_cpu) else 0
    return Memory(
        (shared + experts + copied) * size + (4 * both if lora else 0),
        4 * both,
        _optimizer_bytes(config, facts, sum(kept)),
        _megatron_activations(config, backend, facts),
    )


def _generates_itself(config: TrainConfig, facts: Facts, on_cpu: bool) -> bool:
    """Whether the run generates without vLLM: then each process has a model to generate with, whole."""
    if isinstance(config.sampler, SamplerConfig):
        return chosen_sampler(config.sampler, facts, on_cpu).name == "transformers"
    return bool(config.data.sample_prompts)


def _megatron_activations(config: TrainConfig, backend: MegatronBackendConfig, facts: Facts) -> int:
    """The first stage begins as many micro-batches as there are stages before it goes back through one, so that it holds a
    whole model's layers of one micro-batch; interleaved, somewhat more (Narayanan et al. 2021, arXiv:2104.04473)."""
    stages = backend.pipeline_parallel
    held = facts.num_layers * (1 + (stages - 1) / (stages * backend.virtual_stages) * (backend.virtual_stages > 1))
    along = backend.tensor_parallel if backend.sequence_parallel is not False else 1
    layer = _layer_values(config, facts, backend.tensor_parallel, expert_tensor_parallel(backend), along)
    kept = held * layer
    if backend.recompute is Recompute.full:
        kept = held / backend.recompute_layers * facts.hidden_size / along + backend.recompute_layers * layer
    return _activation_bytes(config, facts, kept, backend.context_parallel, backend.tensor_parallel)


def _bytes_each(config: TrainConfig) -> int:
    return 2 if config.model.dtype is DType.bfloat16 else 4


def _optimizer_bytes(config: TrainConfig, facts: Facts, trained: int) -> int:
    optimizer = config.optimizer
    lora = isinstance(config.adapter, LoraAdapterConfig)
    master = 4 if config.model.dtype is DType.bfloat16 and not lora else 0
    if isinstance(optimizer, AdamConfig):
        state = 8 * trained
    elif isinstance(optimizer, SgdConfig):
        state = 4 * trained if optimizer.momentum else 0
    elif isinstance(optimizer, MuonConfig):
        others = 0 if lora else facts.embedding_parameters
        state = (4 * (trained - others) if optimizer.momentum else 0) + 8 * others
    return state + master * trained


def _layer_values(config: TrainConfig, facts: Facts, tensor: int = 1, expert_tensor: int = 1, along: int = 1) -> float:
    """Values that a layer keeps of a token on one of ``tensor`` processes that share its matrices (``expert_tensor``: those of
    an expert) and, with ``along`` > 1, what lies between them."""
    heads = (facts.num_heads + 2 * facts.num_kv_heads) * facts.head_dim
    mlp = 3 * facts.intermediate_size / tensor
    if facts.num_experts:
        mixture = facts.experts_per_token * (3 * facts.expert_intermediate_size / expert_tensor + 2 * facts.hidden_size)
        mlp = max(mixture, mlp if facts.has_dense_layers else 0)
    layer = 4 * facts.hidden_size / along + (2 * heads + facts.num_heads * facts.head_dim) / tensor + mlp
    if isinstance(config.adapter, LoraAdapterConfig):  # the outputs of base layer and adapter beside their sum
        layer += 2 * sum(rows for rows, _ in facts.linear_shapes) / max(1, facts.num_layers) / tensor
    return layer


def _activation_bytes(config: TrainConfig, facts: Facts, kept: float, context: int = 1, tensor: int = 1) -> int:
    """``kept``: values of a token in all layers. ``context`` processes share its row, ``tensor`` the vocabulary."""
    trainer = config.trainer
    rows = min(trainer.micro_batch_size or 1, trainer.batch_size * getattr(config.rollout, "num_generations", 1))
    longest = config.data.max_length + getattr(config.sampler, "max_tokens", 0)  # a prompt and its answer
    together = 2 if config.data.pairs else 1
    tokens = max(trainer.micro_batch_tokens or rows * longest * together, longest * together)
    chunk = min(config.backend.logits_chunk, tokens)
    values = tokens / context * (kept + 4 * facts.hidden_size)
    return int(_bytes_each(config) * values + 3 * 4 * chunk * facts.vocab_size / tensor)


def available_bytes() -> int:
    """Memory of this machine, or of the container it is."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text(encoding="ascii").strip() if limit.is_file() else "max"
    return total if text == "max" else min(total, int(text))
