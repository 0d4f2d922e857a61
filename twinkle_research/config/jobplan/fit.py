"""Of the layouts that fit the GPUs, the nearest to the one that was asked for."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from twinkle_research.config.jobplan.hardware import PER_MACHINE
from twinkle_research.config.jobplan.memory import Memory, estimate, resident
from twinkle_research.config.jobplan.sampling import SamplingMemory, sampling_memory
from twinkle_research.config.jobplan.step import step_time
from twinkle_research.config.jobplan.traffic import flows
from twinkle_research.config.jobplan.workload import workload
from twinkle_research.config.megatronchecks import megatron_against_model, processes_problems
from twinkle_research.config.samplerchecks import fills_machines
from twinkle_research.distributed.gpus import Hardware
from twinkle_research.model.config import Sharding, TransformersBackendConfig
from twinkle_research.model.facts import Facts
from twinkle_research.model.megatron.config import MODEL_TYPES, MegatronBackendConfig, Recompute
from twinkle_research.sampler.choice import chosen_sampler
from twinkle_research.sampler.config import SamplerConfig, VLLMSamplerConfig
from twinkle_research.trainer.config import AdamConfig, TrainConfig

MOST_GPUS = 4096
Choice = tuple[float, dict[str, Any]]  # cost, and what changes: key -> value
Axis = list[Choice]  # the cheapest first
_SHARES = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)  # of a GPU's memory, for an engine


@dataclass(frozen=True)
class Fit:
    """``changes``: key -> value that makes ``config`` of the one that does not fit, on ``nodes`` machines."""

    changes: dict[str, Any]
    config: TrainConfig
    memory: Memory
    nodes: int

    def text(self) -> str:
        return " ".join(f"{key}={_shown(value)}" for key, value in self.changes.items())


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(getattr(value, "name", value))


def fits(memory: Memory, config: TrainConfig, hardware: Hardware) -> bool:
    """Whether both phases do, and the engine's cache has room for one completion."""
    if memory.total > hardware.memory:
        return False
    return _has_room(memory.sampler, config)


def _has_room(sampler: SamplingMemory, config: TrainConfig) -> bool:
    return not sampler.wanted or sampler.tokens >= config.data.max_length + config.sampler.max_tokens


def nearest_fit(config: TrainConfig, facts: Facts, hardware: Hardware, nodes: int, nproc: int) -> Fit | None:
    """The smallest change that fits on the same GPUs, else on twice as many, and so on: first in the same machines, then in more
    of them. None where there is none."""
    most, given = max(MOST_GPUS, nodes * nproc), nproc
    while nodes * nproc <= most:
        found = _on(config, facts, hardware, nodes, nproc)
        if found is not None:
            more = {} if nproc == given else {"launch.nproc_per_node": nproc}
            return replace(found, changes=more | found.changes)
        if 2 * nproc <= PER_MACHINE:
            nproc *= 2
        else:
            nodes *= 2
    return None


def _on(config: TrainConfig, facts: Facts, hardware: Hardware, nodes: int, nproc: int) -> Fit | None:
    from twinkle_research.config.checks import stage_1

    base = replace(config, launch=replace(config.launch, nodes=nodes, nproc_per_node=nproc))
    more = {} if nodes == config.launch.nodes else {"launch.nodes": nodes}
    for backend in _backends(config, facts, nodes * nproc):
        start = replace(base, backend=backend)
        if backend is not config.backend and any(stage_1(start)):
            continue  # what it does not do, with whatever layout
        named = more if backend is config.backend else {**more, "backend": backend.name}
        found: list[tuple[float, Fit]] = []  # of the same cost, by the seconds of a step
        least = math.inf
        for cost, changes in _changes(start, facts, hardware, nproc, nodes * nproc):
            if cost > least:
                break
            changed = _applied(start, changes)
            memory = estimate(changed, facts, nodes * nproc, hardware, on_cpu=False)
            if fits(memory, changed, hardware) and not any(stage_1(changed)):
                least = cost
                fit = Fit({**named, **changes}, changed, memory, nodes)
                found.append((_seconds(fit, facts, hardware, nproc), fit))
        if found:
            return min(found, key=lambda item: item[0])[1]
    return None


def _seconds(fit: Fit, facts: Facts, hardware: Hardware, nproc: int) -> float:
    world_size = fit.nodes * nproc
    work, moved = workload(fit.config, world_size), flows(fit.config, facts, world_size, nproc)
    return step_time(fit.config, facts, work, fit.memory, moved, world_size, hardware).total


def _backends(config: TrainConfig, facts: Facts, world_size: int) -> Iterator[Any]:
    """The one that was asked for, and Megatron-Core where that may split what the other one cannot."""
    yield config.backend
    if isinstance(config.backend, TransformersBackendConfig) and world_size > 1 and facts.model_type in MODEL_TYPES:
        yield MegatronBackendConfig(device=config.backend.device, logits_chunk=config.backend.logits_chunk)


# --- changes, the smallest first ------------------------------------------------------------------------------------


def _changes(config: TrainConfig, facts: Facts, hardware: Hardware, nproc: int, world_size: int) -> Iterator[Choice]:
    """Combinations of what can be changed by what it costs: more processes for one share of the data, work done twice, smaller
    passes."""
    of_sampler, least = _of_sampler(config, facts, hardware, nproc, world_size)
    axes = [*_of_trainer(config), of_sampler]
    if isinstance(config.backend, MegatronBackendConfig):
        room = hardware.memory - least
        axes += _of_megatron(config, config.backend, facts, room, nproc, world_size)
    else:
        axes += _of_transformers(config, config.backend, world_size)
    if all(axes):
        yield from _combined(axes)


def _combined(axes: list[Axis]) -> Iterator[Choice]:
    """One choice of each axis, the cheapest combinations first."""
    heap, seen = [(0.0, (0,) * len(axes))], {(0,) * len(axes)}
    while heap:
        cost, places = heapq.heappop(heap)
        yield cost, {key: value for axis, place in zip(axes, places, strict=True) for key, value in axis[place][1].items()}
        for i, axis in enumerate(axes):
            following = (*places[:i], places[i] + 1, *places[i + 1 :])
            if following[i] < len(axis) and following not in seen:
                seen.add(following)
                heapq.heappush(heap, (cost - axis[places[i]][0] + axis[following[i]][0], following))


def _of_trainer(config: TrainConfig) -> Iterator[Axis]:
    trainer = config.trainer
    key = "micro_batch_tokens" if trainer.micro_batch_tokens is not None else "micro_batch_size"
    size, choices = getattr(trainer, key) or 1, [(0.0, {})]
    longest = config.data.max_length + getattr(config.sampler, "max_tokens", 0) if key.endswith("tokens") else 1
    while size // 2 >= longest:
        size //= 2
        choices.append((1.0 * len(choices), {f"trainer.{key}": size}))
    yield choices


def _of_sampler(config: TrainConfig, facts: Facts, hardware: Hardware, nproc: int, world_size: int) -> tuple[Axis, int]:
    """Those with room for a completion, and the least memory that one of them takes."""
    sampler, axes = config.sampler, []
    if not isinstance(sampler, SamplerConfig) and sampling_memory(config, facts, world_size, hardware, on_cpu=False).weights:
        return [(0.0, {}), (1.0, {"data.sample_prompts": []})], 0  # which are answered by a copy of the whole model
    if not isinstance(sampler, SamplerConfig) or chosen_sampler(sampler, facts, on_cpu=False).name != "vllm":
        return [(0.0, {})], 0
    named = {} if isinstance(sampler, VLLMSamplerConfig) else {"sampler": "vllm"}
    own = getattr(sampler, "tensor_parallel", 1)
    nodes = world_size // nproc
    sizes = [n for n in (2, 4, 8, 16) if n > own and fills_machines(n, nproc, nodes) and facts.num_heads % n == 0]
    axes.append(
        [(0.0, {}), *((1.0 + i + 2 * (size > nproc), named | {"sampler.tensor_parallel": size}) for i, size in enumerate(sizes))]
    )
    if getattr(sampler, "kv_cache_gib", None) is None:
        present = getattr(sampler, "gpu_memory_utilization", VLLMSamplerConfig.gpu_memory_utilization)
        shares = [share for share in _SHARES if share > present]
        axes.append([(0.0, {}), *((1.0 + i, named | {"sampler.gpu_memory_utilization": s}) for i, s in enumerate(shares))])
    found, least = [], []
    for cost, changes in _combined(axes):
        memory = sampling_memory(_applied(config, changes), facts, world_size, hardware, on_cpu=False)
        if _has_room(memory, config):
            found.append((cost, changes))
            least.append(memory.awake)
    return found, min(least, default=0)


def _of_megatron(
    config: TrainConfig, backend: MegatronBackendConfig, facts: Facts, room: float, nproc: int, world_size: int
) -> Iterator[Axis]:
    """Only layouts that are possible, and in which what stays between passes fits into ``room``."""
    if backend.recompute is not Recompute.full:
        yield [(0.0, {}), (2.0, {"backend.recompute": Recompute.full})]
    limits = {
        "tensor_parallel": (2.0, min(nproc, facts.num_kv_heads)), "pipeline_parallel": (3.0, facts.num_layers),
        "context_parallel": (3.0, 32), "expert_parallel": (2.0, facts.num_experts or 1),
    }  # fmt: skip
    axes: list[Axis] = []
    if not backend.distributed_optimizer and isinstance(config.optimizer, AdamConfig):
        axes.append([(0.0, {}), (1.0, {"backend.distributed_optimizer": True})])
    for key, (cost, most) in limits.items():
        present = getattr(backend, key)
        sizes = _divided(facts.num_layers, present) if key == "pipeline_parallel" else _doubled(present, world_size)
        valid = [size for size in sizes if size <= min(most, world_size) and world_size % size == 0]
        axes.append([(0.0, {}), *((cost * (i + 1), {f"backend.{key}": size}) for i, size in enumerate(valid))])
    layouts: Axis = []
    for chosen in itertools.product(*axes):
        changes = {key: value for _, own in chosen for key, value in own.items()}
        changed = _applied(config, changes)
        if any(processes_problems(changed.backend, world_size, facts=facts)) or any(megatron_against_model(changed, facts)):
            continue
        if resident(changed, facts, world_size) <= room:
            layouts.append((sum(cost for cost, _ in chosen), changes))
    yield sorted(layouts, key=lambda item: item[0])


def _doubled(present: int, most: int) -> list[int]:
    return [present << i for i in range(1, (most // present).bit_length())]


def _divided(layers: int, present: int) -> list[int]:
    return [size for size in range(present + 1, layers + 1) if layers % size == 0]


def _of_transformers(config: TrainConfig, backend: TransformersBackendConfig, world_size: int) -> Iterator[Axis]:
    if not backend.gradient_checkpointing:
        yield [(0.0, {}), (2.0, {"backend.gradient_checkpointing": True})]
    if world_size > 1 and backend.sharding is not Sharding.fsdp2:
        yield [(0.0, {}), (2.0, {"backend.sharding": Sharding.fsdp2})]


def _applied(config: TrainConfig, changes: dict[str, Any]) -> TrainConfig:
    groups: dict[str, dict[str, Any]] = {}
    for key, value in changes.items():
        group, _, name = key.partition(".")
        groups.setdefault(group, {})
        if name:
            groups[group][name] = value
    sections = {}
    for group, values in groups.items():
        present = getattr(config, group)
        if group == "sampler" and not isinstance(present, VLLMSamplerConfig):
            from twinkle_research.sampler.config import vllm_config

            present = vllm_config(present)
        sections[group] = replace(present, **values)
    return replace(config, **sections)
