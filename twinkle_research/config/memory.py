"""Estimate of a process's memory in training, from dimensions alone."""

import os
from dataclasses import dataclass
from pathlib import Path

from twinkle_research.model.config import DType, LoraAdapterConfig, NoAdapterConfig, Sharding
from twinkle_research.model.facts import ALL_LINEAR, Facts
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
        matched = {name for target in adapter.target_modules for name in facts.matching(target)}
        trained = trained * len(matched) // max(1, len(facts.linear_shapes))
    return trained


def estimate(config: TrainConfig, facts: Facts, world_size: int = 1) -> Memory:
    """Weights, gradients and optimizer state are exact up to small buffers; activations count what a Llama-like layer
    keeps for its backward pass with fused attention, fitted to the peaks of SmolLM2-135M (LoRA and full) on a CPU."""
    size = 2 if config.model.dtype is DType.bfloat16 else 4
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
    return Memory(weights, gradients, optimizer, _activation_bytes(config, facts))


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


def _activation_bytes(config: TrainConfig, facts: Facts) -> int:
    trainer = config.trainer
    rows = min(trainer.micro_batch_size or 1, trainer.batch_size * getattr(config.rollout, "num_generations", 1))
    longest = config.data.max_length + getattr(config.sampler, "max_tokens", 0)  # a prompt and its answer
    together = 2 if config.data.pairs else 1
    tokens = max(trainer.micro_batch_tokens or rows * longest * together, longest * together)
    size = 2 if config.model.dtype is DType.bfloat16 else 4
    heads = (facts.num_heads + 2 * facts.num_kv_heads) * facts.head_dim
    layer = 4 * facts.hidden_size + 2 * heads + facts.num_heads * facts.head_dim + 3 * facts.intermediate_size
    if isinstance(config.adapter, LoraAdapterConfig):  # the outputs of base layer and adapter beside their sum
        layer += 2 * sum(rows for rows, _ in facts.linear_shapes) // max(1, facts.num_layers)
    layers = facts.hidden_size * facts.num_layers + layer if config.backend.gradient_checkpointing else layer * facts.num_layers
    chunk = min(config.backend.logits_chunk, tokens)
    return size * tokens * (layers + 4 * facts.hidden_size) + 3 * 4 * chunk * facts.vocab_size


def available_bytes() -> int:
    """Memory of this machine, or of the container it is."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text(encoding="ascii").strip() if limit.is_file() else "max"
    return total if text == "max" else min(total, int(text))
