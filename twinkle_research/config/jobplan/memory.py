"""Memory of a process, from dimensions alone: what it holds, and what it needs in training and in sampling.

Weights, gradients and optimizer state are exact (tests/model/megatron/test_plan_measured.py), but for the padding of a
distributed optimizer, in which each parameter begins at a multiple of 64.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from twinkle_research.config.jobplan.activations import activation_bytes, bytes_each
from twinkle_research.config.jobplan.sampling import SamplingMemory, sampling_memory
from twinkle_research.config.jobplan.shapes import (
    Held,
    adapted_in_stage,
    fullest_stage,
    held_by_stages,
    lora_parameters,
    trainable_parameters,
)
from twinkle_research.config.jobplan.workload import COPY, has_critic, reference_kind, workload
from twinkle_research.distributed.gpus import GIB, Hardware, gib
from twinkle_research.model.config import DType, LoraAdapterConfig, Sharding
from twinkle_research.model.facts import Facts
from twinkle_research.model.megatron.config import MegatronBackendConfig, expert_processes
from twinkle_research.trainer.config import AdamConfig, MuonConfig, SgdConfig, TrainConfig

_RUNTIME = int(0.6 * GIB)  # Python, torch and its libraries
# CUDA context and kernels 0.6, buffers of NCCL 1, of matrix products 0.1, what the allocator cannot use 0.8: an allowance.
_GPU_RUNTIME = int(2.5 * GIB)


@dataclass(frozen=True)
class Memory:
    """Bytes of the process that has most, with the longest rows that the config allows.

    ``weights``, ``gradients`` and ``optimizer`` are those of what trains, a critic included; ``reference`` a copy that the
    policy is compared with; ``sampler`` what samples. ``gradients_stay``: while it samples, too.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    reference: int = 0
    sampler: SamplingMemory = SamplingMemory()
    runtime: int = _RUNTIME
    gradients_stay: bool = False

    @property
    def training(self) -> int:
        own = self.weights + self.gradients + self.optimizer + self.activations + self.reference
        return own + self.sampler.asleep + self.runtime

    @property
    def sampling(self) -> int:
        """0 without a sampler."""
        if not self.sampler.awake:
            return 0
        own = self.weights + self.optimizer + self.reference + (self.gradients if self.gradients_stay else 0)
        return own + self.sampler.awake + self.runtime

    @property
    def total(self) -> int:
        return max(self.training, self.sampling)

    def text(self) -> str:
        names = ("weights", "gradients", "optimizer", "activations", "reference")
        parts = [(name, getattr(self, name)) for name in names if name != "reference" or self.reference]
        shown = ", ".join(f"{name} {gib(size)}" for name, size in parts)
        text = f"at most about {self.total / GIB:.1f} GiB a process (rows of full length: {shown}"
        if self.sampler.awake:
            text += (
                f"; {self.training / GIB:.1f} while it trains; {self.sampling / GIB:.1f} while it samples: {self.sampler.text()}"
            )
        return text + ")"


def estimate(config: TrainConfig, facts: Facts, world_size: int, hardware: Hardware | None, *, on_cpu: bool) -> Memory:
    """``hardware``: None where the GPU's memory is not known, of which a vLLM engine takes a share."""
    backend, work = config.backend, workload(config, world_size)
    megatron = isinstance(backend, MegatronBackendConfig)
    found = _megatron(config, backend, facts, world_size) if megatron else _transformers(config, facts, world_size)
    return replace(
        found,
        activations=found.activations + activation_bytes(config, facts, work, on_cpu=on_cpu),
        sampler=sampling_memory(config, facts, world_size, hardware, on_cpu=on_cpu),
        runtime=_RUNTIME if on_cpu else _GPU_RUNTIME,
        gradients_stay=megatron,
    )


def resident(config: TrainConfig, facts: Facts, world_size: int) -> int:
    """Bytes on a GPU of what a layout of Megatron-Core keeps between passes, the least that it needs."""
    found = _megatron(config, config.backend, facts, world_size)
    return found.weights + found.gradients + found.optimizer + found.reference + _GPU_RUNTIME


def _transformers(config: TrainConfig, facts: Facts, world_size: int) -> Memory:
    size, lora = bytes_each(config), isinstance(config.adapter, LoraAdapterConfig)
    critic = facts.hidden_size + 1 if has_critic(config) else 0
    trained = trainable_parameters(config.adapter, facts)
    copies = reference_kind(config) == COPY
    if config.backend.sharding is Sharding.fsdp2:
        return _sharded(config, facts, world_size, trained, critic, copies)
    state = _optimizer_bytes(config, facts, trained) + _moments(config) * critic
    return Memory(
        facts.parameters * size + (4 * trained if lora else 0) + 4 * critic,
        4 * (trained + critic),
        state,
        0,
        (4 if lora else size) * trained if copies else 0,
    )


def _sharded(config: TrainConfig, facts: Facts, world_size: int, trained: int, critic: int, copies: bool) -> Memory:
    """A process has its rows of everything, in float32 where it is trained (its own master, then); an adapter is not split.

    Whole, while they are used: what lies outside the layers, one layer and the next one, in the dtype of the passes; on the
    way back also the gradients of those outside and of a layer, and once more in float32 where they are summed.
    """
    size, lora = bytes_each(config), isinstance(config.adapter, LoraAdapterConfig)
    layer = (facts.parameters - facts.embedding_parameters) // max(1, facts.num_layers)
    whole = size * (facts.embedding_parameters + 2 * layer)
    if lora:
        weights, kept, own = size * -(-facts.parameters // world_size) + 4 * trained, trained, trained
    else:
        own = kept = -(-facts.parameters // world_size)
        weights = 4 * own
        whole += size * (facts.embedding_parameters + layer) + 4 * max(layer, facts.embedding_parameters)
    return Memory(
        weights + 4 * critic,
        4 * (own + critic),
        _optimizer_bytes(config, facts, kept, masters=False) + _moments(config) * critic,
        whole,
        4 * own if copies else 0,
    )


def _megatron(config: TrainConfig, backend: MegatronBackendConfig, facts: Facts, world_size: int) -> Memory:
    """Of the pipeline stage that holds most."""
    size, lora = bytes_each(config), isinstance(config.adapter, LoraAdapterConfig)
    tensor, stages, stage = backend.tensor_parallel, backend.pipeline_parallel, fullest_stage(facts, backend)
    held = trained = held_by_stages(facts, backend)[stage]
    if lora:
        trained = Held(lora_parameters(config.adapter, adapted_in_stage(config.adapter, facts, backend, stage), tensor), 0)
    critic = facts.hidden_size + 1 if has_critic(config) else 0
    trained = Held(trained.dense + critic, trained.experts)
    # Context-parallel processes hold the same weights, so what is split over copies is split over them, too.
    copies = world_size // (tensor * stages), world_size // expert_processes(backend)
    kept = [count // max(1, n) for count, n in zip((trained.dense, trained.experts), copies, strict=True)]
    optimized = sum(kept) if backend.distributed_optimizer else trained.both
    reference = 0
    if reference_kind(config) == COPY:
        reference = (4 if lora else size) * (trained.both - critic)
    return Memory(
        held.both * size + 4 * (trained.both if lora else critic),
        4 * trained.both,
        _optimizer_bytes(config, facts, optimized),
        0,
        reference,
    )


def _moments(config: TrainConfig) -> int:
    """Bytes that the optimizer keeps of a number, beside a master."""
    optimizer = config.optimizer
    if isinstance(optimizer, AdamConfig):
        return 8
    return (4 if optimizer.momentum else 0) if isinstance(optimizer, SgdConfig) else 8


def _optimizer_bytes(config: TrainConfig, facts: Facts, trained: int, masters: bool = True) -> int:
    lora = isinstance(config.adapter, LoraAdapterConfig)
    master = 4 if masters and config.model.dtype is DType.bfloat16 and not lora else 0
    if isinstance(config.optimizer, MuonConfig):
        others = 0 if lora else facts.embedding_parameters
        state = (4 * (trained - others) if config.optimizer.momentum else 0) + 8 * others
    else:
        state = _moments(config) * trained
    return state + master * trained


def available_bytes() -> int:
    """Memory of this machine, or of the container it is."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text(encoding="ascii").strip() if limit.is_file() else "max"
    return total if text == "max" else min(total, int(text))
