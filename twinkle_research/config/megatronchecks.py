"""What ``backend=megatron`` asks of its layout, of the processes, of the model and of the rest of the config."""

from __future__ import annotations

import math
from collections.abc import Iterator

from packaging.specifiers import SpecifierSet

from twinkle_research.checkpoint.config import CheckpointFormat
from twinkle_research.config.jobplan.hardware import PER_MACHINE
from twinkle_research.config.layouts import beside, data_parallel_size, divisors, fewest_processes, neighbours
from twinkle_research.model.config import Attention, Device, LoraAdapterConfig
from twinkle_research.model.facts import Facts, is_vocabulary_module
from twinkle_research.model.megatron.config import (
    MODEL_TYPES,
    MegatronBackendConfig,
    Recompute,
    expert_processes,
    expert_tensor_parallel,
    model_processes,
    no_counterpart,
)
from twinkle_research.model.megatron.installed import megatron_version, transformer_engine_installed
from twinkle_research.trainer.config import MuonConfig, SgdConfig, TrainConfig

VERSIONS = ">=0.16.1,<0.20"
_ELSEWHERE = "backend=transformers"


def megatron_problems(config: TrainConfig) -> Iterator[str]:
    """Of the config alone."""
    backend = config.backend
    if not isinstance(backend, MegatronBackendConfig) or any(_layout(backend)[key] < 1 for key in _layout(backend)):
        return
    yield from _without_effect(backend)
    yield from _not_done(config)


def _layout(backend: MegatronBackendConfig) -> dict[str, int]:
    keys = ("tensor_parallel", "pipeline_parallel", "virtual_stages", "context_parallel", "expert_parallel")
    return {key: getattr(backend, key) for key in keys} | {"expert_tensor_parallel": expert_tensor_parallel(backend)}


def _without_effect(backend: MegatronBackendConfig) -> Iterator[str]:
    if backend.virtual_stages > 1 and backend.pipeline_parallel == 1:
        yield (
            f"backend.virtual_stages={backend.virtual_stages} cuts the stages of a pipeline, but backend.pipeline_parallel=1; "
            "write backend.virtual_stages=1, or backend.pipeline_parallel=2"
        )
    if backend.sequence_parallel and backend.tensor_parallel == 1:
        yield (
            "backend.sequence_parallel=true has no effect with backend.tensor_parallel=1: it splits what the tensor-parallel "
            "processes would each compute whole; write null"
        )
    if backend.overlap_param_gather and not (backend.distributed_optimizer and backend.overlap_grad_reduce):
        yield (
            "backend.overlap_param_gather=true needs backend.distributed_optimizer=true, without which there is nothing to "
            "gather, and backend.overlap_grad_reduce=true, without which all of it is one piece"
        )
    if backend.recompute_layers != 1 and backend.recompute is not Recompute.full:
        yield (
            f"'backend.recompute_layers' has no effect with backend.recompute={backend.recompute.name}; write 1, or "
            "backend.recompute=full"
        )
    if backend.transformer_engine and backend.device is Device.cpu:
        yield "backend.transformer_engine=true needs a GPU, but backend.device=cpu; write null"


def _not_done(config: TrainConfig) -> Iterator[str]:
    """What works with backend=transformers and not here."""
    backend, optimizer, adapter = config.backend, config.optimizer, config.adapter
    if isinstance(optimizer, MuonConfig):
        yield f"optimizer=muon needs whole matrices, which backend=megatron cuts; write optimizer=adamw, or {_ELSEWHERE}"
    if isinstance(optimizer, SgdConfig):
        if optimizer.nesterov:
            yield f"optimizer.nesterov=true: Megatron-Core's SGD has no such momentum; write false, or {_ELSEWHERE}"
        if backend.distributed_optimizer:
            yield "backend.distributed_optimizer=true splits the state of Adam only; write optimizer=adamw, or false"
    if isinstance(adapter, LoraAdapterConfig):
        if backend.overlap_param_gather:
            yield f"backend.overlap_param_gather=true is for training all weights, but adapter={adapter.name}; write false"
        if adapter.dora:
            yield f"adapter.dora=true reads whole weights, which backend=megatron cuts; write {_ELSEWHERE}"
        if adapter.modules_to_save:
            yield f"adapter.modules_to_save copies whole weights, which backend=megatron cuts; write {_ELSEWHERE}"
        for name in filter(is_vocabulary_module, adapter.target_modules):
            yield f"'adapter.target_modules' names {name}, which backend=megatron cuts along the vocabulary; write {_ELSEWHERE}"
    if config.model.attention is not Attention.auto:
        yield (
            f"'model.attention' has no effect with backend=megatron, which computes attention itself (see "
            f"backend.transformer_engine); write auto, or {_ELSEWHERE}"
        )
    if config.checkpoint.background and config.checkpoint.format is CheckpointFormat.consolidated:
        yield (
            "checkpoint.background=true copies the whole model, which backend=megatron avoids; write false, or "
            "checkpoint.format=sharded, where each process copies its own part"
        )


def processes_problems(
    backend: MegatronBackendConfig, world_size: int, nodes: int = 1, facts: Facts | None = None
) -> Iterator[str]:
    """Of a layout on ``world_size`` processes of ``nodes`` machines, as Megatron-Core divides them: world = tensor x pipeline x
    context x data, and beside it world = expert_tensor x expert x pipeline x expert_data. ``facts`` of the model, where they are
    known, so that what is proposed suits its experts."""
    needed, tensor, stages = model_processes(backend), backend.tensor_parallel, backend.pipeline_parallel
    if world_size % needed:
        yield (
            f"backend.tensor_parallel x pipeline_parallel x context_parallel = {tensor} x {stages} x {backend.context_parallel} "
            f"= {needed} must divide the {world_size} processes; start {_start(backend, needed, world_size, nodes)}"
        )
    elif world_size % expert_processes(backend):
        own, experts = expert_tensor_parallel(backend), backend.expert_parallel
        instead = _experts_beside(backend, world_size, facts)
        yield (
            f"backend.expert_parallel x expert_tensor_parallel x pipeline_parallel = {experts} x {own} x {stages} = "
            f"{expert_processes(backend)} must divide the {world_size} processes; give {instead}, or "
            f"start {_start(backend, fewest_processes(backend), world_size, nodes)}"
        )


def _experts_beside(backend: MegatronBackendConfig, world_size: int, facts: Facts | None) -> str:
    """The nearest number of processes for experts that divides the processes at hand and the experts; before it, where there is
    none, one of those that share an expert's matrices."""
    count, width = (facts.num_experts, facts.expert_intermediate_size) if facts is not None else (0, 0)
    shares, own, experts = world_size // backend.pipeline_parallel, expert_tensor_parallel(backend), backend.expert_parallel
    more = ""
    if shares % own:
        own = min((n for n in divisors(shares) if width % n == 0), key=lambda n: (abs(n - own), n))
        more = f"backend.expert_tensor_parallel={own}"
        if shares // own % experts == 0:
            return more
    valid = [n for n in divisors(shares // own) if count % n == 0]
    return f"{more} backend.expert_parallel={neighbours(experts, valid)}".lstrip()


def _start(backend: MegatronBackendConfig, step: int, world_size: int, nodes: int) -> str:
    """Numbers of processes on each machine that make a multiple of ``step``, else numbers of machines that do."""
    each, on_each = world_size // nodes, step // math.gcd(step, nodes)
    most = math.inf if backend.device is Device.cpu else max(PER_MACHINE, each)
    if on_each <= most:
        machines = "on one machine" if nodes == 1 else f"on each of the {nodes} machines"
        return f"{beside(each, on_each, most)} of them (launch.nproc_per_node, {machines})"
    each = each if step % each == 0 else PER_MACHINE
    machines = step // math.gcd(step, each)
    return f"{each} of them on each machine (launch.nproc_per_node) with launch.nodes={beside(nodes, machines)}"


# --- against the model ----------------------------------------------------------------------------------------------


def megatron_against_model(config: TrainConfig, facts: Facts) -> Iterator[str]:
    backend = config.backend
    if not isinstance(backend, MegatronBackendConfig):
        return
    model = config.model.path or f"model={config.model.name}"
    if facts.model_type not in MODEL_TYPES:
        yield no_counterpart(model, facts.model_type)
        return
    yield from _tensor_parallel(backend, facts, model)
    yield from _stages(backend, facts, model)
    yield from _experts(backend, facts, model)


def megatron_on_processes(config: TrainConfig, facts: Facts) -> Iterator[str]:
    """Of the processes that ``launch`` names."""
    backend, launch = config.backend, config.launch
    if isinstance(backend, MegatronBackendConfig) and launch.nproc_per_node is not None:
        yield from processes_problems(backend, launch.nproc_per_node * launch.nodes, launch.nodes, facts)


def _tensor_parallel(backend: MegatronBackendConfig, facts: Facts, model: str) -> Iterator[str]:
    sizes = {"attention heads": facts.num_heads, "key-value heads": facts.num_kv_heads}
    if facts.has_dense_layers:
        sizes["columns of the MLP"] = facts.intermediate_size
    if facts.shared_expert_size:
        sizes["columns of the shared expert"] = facts.shared_expert_size
    sizes |= {f"rows of {name}": rows for name, rows in facts.compressed}
    if wrong := [f"{size} {what}" for what, size in sizes.items() if size % backend.tensor_parallel]:
        instead = neighbours(backend.tensor_parallel, divisors(*sizes.values()))
        yield (
            f"backend.tensor_parallel={backend.tensor_parallel} must divide the {' and the '.join(wrong)} of {model}; write "
            f"{instead}"
        )


def _stages(backend: MegatronBackendConfig, facts: Facts, model: str) -> Iterator[str]:
    layers, stages, chunks = facts.num_layers, backend.pipeline_parallel, backend.virtual_stages
    own, together = layers // stages, layers // stages // chunks
    if layers % stages:
        yield (
            f"backend.pipeline_parallel={stages} must divide the {layers} layers of {model}: the stages are equal; write "
            f"{neighbours(stages, divisors(layers))}"
        )
    elif own % chunks:
        yield (
            f"backend.virtual_stages={chunks} must divide the {own} layers that each of the {stages} pipeline stages of {model} "
            f"has; write {neighbours(chunks, divisors(own))}"
        )
    elif backend.recompute is Recompute.full and together % backend.recompute_layers:
        yield (
            f"backend.recompute_layers={backend.recompute_layers} must divide the {together} layers that a process of this "
            f"layout computes in one go; write {neighbours(backend.recompute_layers, divisors(together))}"
        )


def _experts(backend: MegatronBackendConfig, facts: Facts, model: str) -> Iterator[str]:
    if not facts.num_experts:
        if backend.expert_parallel > 1:
            yield f"backend.expert_parallel={backend.expert_parallel} has no effect: {model} has no experts; write 1"
        if backend.expert_tensor_parallel is not None:
            yield f"'backend.expert_tensor_parallel' has no effect: {model} has no experts; write null"
        return
    if facts.num_experts % backend.expert_parallel:
        yield (
            f"backend.expert_parallel={backend.expert_parallel} must divide the {facts.num_experts} experts of {model}; write "
            f"{neighbours(backend.expert_parallel, divisors(facts.num_experts))}"
        )
    tensor = expert_tensor_parallel(backend)
    shared = backend.expert_tensor_parallel is None
    if facts.expert_intermediate_size % tensor and not (shared and any(_tensor_parallel(backend, facts, model))):
        key = "tensor_parallel" if shared else "expert_tensor_parallel"
        yield (
            f"backend.{key}={tensor} must divide the {facts.expert_intermediate_size} columns of each expert of {model}; write "
            f"backend.expert_tensor_parallel={neighbours(tensor, divisors(facts.expert_intermediate_size))}"
        )
    if backend.sequence_parallel is False and backend.tensor_parallel > 1:
        yield (
            f"backend.sequence_parallel=false with backend.tensor_parallel={backend.tensor_parallel}: Megatron-Core does not "
            f"train experts, which {model} has, in this way; write null"
        )


def megatron_notes(config: TrainConfig, world_size: int) -> Iterator[str]:
    """What is allowed, and seldom meant."""
    backend, trainer = config.backend, config.trainer
    if not isinstance(backend, MegatronBackendConfig):
        return
    shares = data_parallel_size(backend, world_size)
    if shares * backend.context_parallel == 1:
        if backend.distributed_optimizer:
            yield "backend.distributed_optimizer=true splits nothing here: each part of the model is on one process only"
        if backend.overlap_grad_reduce:
            yield "backend.overlap_grad_reduce=true overlaps nothing here: each part of the model is on one process only"
    rows = -(-trainer.batch_size * getattr(config.rollout, "num_generations", 1) // shares)
    if trainer.micro_batch_size is not None and trainer.micro_batch_size * backend.pipeline_parallel > rows:
        size = max(1, rows // backend.pipeline_parallel)
        if backend.pipeline_parallel > 1 and trainer.micro_batch_size > size:
            yield (
                f"fewer micro-batches than the {backend.pipeline_parallel} pipeline stages: some wait for the others throughout; "
                f"trainer.micro_batch_size={size} gives them more to do"
            )


# --- what is installed ----------------------------------------------------------------------------------------------


def megatron_installed(config: TrainConfig) -> Iterator[str]:
    backend = config.backend
    if not isinstance(backend, MegatronBackendConfig):
        return
    found = megatron_version()
    if found is None or found not in SpecifierSet(VERSIONS):
        here = "which is not installed" if found is None else f"but {found} is installed"
        yield (f"backend=megatron needs megatron-core{VERSIONS}, {here}: pip install -e '.[megatron]'; or write {_ELSEWHERE}")
    if backend.transformer_engine and not transformer_engine_installed():
        yield (
            "backend.transformer_engine=true needs Transformer Engine, which is not installed: pip install --no-build-isolation "
            "-e '.[te]' on a machine with CUDA; or write null"
        )
