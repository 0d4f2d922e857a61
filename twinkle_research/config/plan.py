"""The run plan: what a command would do, before anything is started. Computed without torch."""

import glob
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from omegaconf import DictConfig

from twinkle_research.config.jobplan.hardware import PER_MACHINE, hardware_of
from twinkle_research.config.jobplan.memory import Memory, available_bytes, estimate
from twinkle_research.config.jobplan.shapes import trainable_parameters
from twinkle_research.config.layouts import data_parallel_size, default_processes, fewest_processes, layout_text
from twinkle_research.config.megatronchecks import megatron_notes, processes_problems
from twinkle_research.config.samplerchecks import engine_problems
from twinkle_research.config.storage import FILE_NAME, to_object
from twinkle_research.dataset.config import (
    CommonDataConfig,
    DataConfig,
    GeneratedDataConfig,
    MixDataConfig,
    eval_path_of,
    sources_of,
)
from twinkle_research.distributed.env import WorldInfo, detect
from twinkle_research.distributed.gpus import GIB, Hardware
from twinkle_research.errors import ConfigError
from twinkle_research.model.config import Device, Sharding
from twinkle_research.model.facts import Facts
from twinkle_research.model.megatron.config import MegatronBackendConfig
from twinkle_research.model.prepare import model_facts
from twinkle_research.rollout.config import SingleTurnConfig
from twinkle_research.sampler.choice import chosen_sampler
from twinkle_research.tracking.config import WandbMode
from twinkle_research.tracking.credentials import resolve_mode
from twinkle_research.trainer.config import TrainConfig

_PER_CORE = 4  # processes on a CPU, above which a note says so


@dataclass(frozen=True)
class RunPlan:
    """``nproc_per_node`` x ``nodes`` = ``world_size`` processes on ``device``; ``layout`` says how they share the work.

    ``parameters`` and ``memory`` are None where the model is on a hub and not yet here. ``hardware``: the GPUs that it is for,
    where the config says so.
    """

    nodes: int
    nproc_per_node: int
    world_size: int
    device: str
    layout: str
    parameters: int | None
    trainable: int | None
    memory: Memory | None
    hardware: Hardware | None = None
    facts: Facts | None = field(default=None, repr=False)
    warnings: tuple[str, ...] = field(default=())


def run_plan(cfg: DictConfig | TrainConfig, world: WorldInfo | None = None) -> RunPlan:
    """The plan of a validated config. Raises ConfigError where the processes at hand do not fit ``launch``, or the layout not
    the GPUs that are planned for."""
    config = cfg if isinstance(cfg, TrainConfig) else to_object(cfg)
    world = world or detect()
    gpus = 0 if config.backend.device is Device.cpu else visible_gpus()
    hardware = hardware_of(config.launch)
    if not gpus and not config.dry_run:
        _check_gpus(config, hardware)
    planned = hardware is not None or config.backend.device is Device.cuda
    nodes, nproc = _processes(config, world, gpus)
    facts = model_facts(config.model)
    _check_layout(config, nodes, nproc, facts)
    device = "cuda" if gpus or planned else "cpu"
    memory = None
    if facts is not None:
        memory = estimate(config, facts, nodes * nproc, hardware, on_cpu=device == "cpu")
        if hardware is not None:
            _check_fit(config, facts, memory, hardware, nodes, nproc)
    return RunPlan(
        nodes=nodes,
        nproc_per_node=nproc,
        world_size=nodes * nproc,
        device=device,
        layout=layout_text(config.backend, nodes, nproc),
        parameters=None if facts is None else facts.parameters,
        trainable=None if facts is None else trainable_parameters(config.adapter, facts),
        memory=memory,
        hardware=hardware,
        facts=facts,
        warnings=tuple(_warnings(config, nodes * nproc, nproc, device, memory, facts)),
    )


def _check_gpus(config: TrainConfig, hardware: Hardware | None) -> None:
    if hardware is not None:
        raise ConfigError(
            f"launch.gpu={config.launch.gpu.name} plans for GPUs, of which none is visible here; add dry_run=true to see the plan"
        )
    if config.backend.device is Device.cuda:
        raise ConfigError("backend.device=cuda, but no GPU is visible here; backend.device=auto or cpu runs without one")


def _check_fit(config: TrainConfig, facts: Facts, memory: Memory, hardware: Hardware, nodes: int, nproc: int) -> None:
    from twinkle_research.config.jobplan.fit import fits
    from twinkle_research.config.jobplan.refusal import refusal

    if not fits(memory, config, hardware):
        raise ConfigError(refusal(config, facts, memory, hardware, nodes, nproc))


def _check_layout(config: TrainConfig, nodes: int, nproc: int, facts: Facts | None) -> None:
    backend, processes = config.backend, nodes * nproc
    if isinstance(backend, MegatronBackendConfig):
        if problems := list(processes_problems(backend, processes, nodes, facts)):
            raise ConfigError("\n".join(problems))
    elif backend.sharding is Sharding.none and processes > 1:
        raise ConfigError(f"backend.sharding=none runs in one process, but {processes} are started; write backend.sharding=ddp")
    elif backend.sharding is Sharding.fsdp2 and processes == 1:
        raise ConfigError(
            "backend.sharding=fsdp2 splits the model over processes, but one is started; give launch.nproc_per_node=2 or more, "
            "or backend.sharding=auto"
        )
    if problems := list(engine_problems(config, nproc, nodes, facts)):
        raise ConfigError("\n".join(problems))


def _processes(config: TrainConfig, world: WorldInfo, gpus: int) -> tuple[int, int]:
    """(nodes, processes on each). Who was started by torchrun or srun takes what there is; ``launch`` must agree."""
    launch = config.launch
    if world.joins:
        nproc, nodes = world.local_world_size, max(1, world.world_size // world.local_world_size)
        if launch.nproc_per_node not in (None, nproc) or launch.nodes not in (1, nodes):
            raise ConfigError(
                f"launch.nodes={launch.nodes} and launch.nproc_per_node={launch.nproc_per_node} contradict {world.kind}, "
                f"which started {world.world_size} processes, {nproc} on this machine; leave them out"
            )
        return nodes, nproc
    if config.dry_run and (launch.nodes > 1 or launch.gpu is not None):
        return launch.nodes, launch.nproc_per_node or _planned(config, gpus)
    if launch.nodes > 1:
        each = launch.nproc_per_node or PER_MACHINE
        raise ConfigError(
            f"launch.nodes={launch.nodes} needs torchrun or srun on every machine: sbatch --nodes={launch.nodes} "
            f"--ntasks-per-node={each} --gpus-per-node={each} slurm/train.sbatch <the other settings, without launch.*> (see "
            "slurm/README.md); dry_run=true shows the plan here"
        )
    nproc = launch.nproc_per_node or default_processes(config.backend, gpus)
    if gpus and nproc > gpus and fewest_processes(config.backend) > gpus:
        raise ConfigError(
            f"the layout of backend.* needs {fewest_processes(config.backend)} GPUs, but {gpus} are visible; lower "
            "tensor_parallel, pipeline_parallel, context_parallel or expert_parallel, or write backend.device=cpu"
        )
    if gpus and nproc > gpus:
        raise ConfigError(
            f"launch.nproc_per_node={nproc} needs as many GPUs, but {gpus} are visible; give {gpus}, or backend.device=cpu"
        )
    return 1, nproc


def _planned(config: TrainConfig, gpus: int) -> int:
    """Processes on each machine of a job that is only planned, where the config does not say."""
    if config.launch.gpu is not None or config.backend.device is Device.cuda:
        return PER_MACHINE
    return -(-default_processes(config.backend, gpus) // config.launch.nodes)


def visible_gpus() -> int:
    """GPUs that torch would see, found without importing it."""
    try:
        if version("torch").endswith("+cpu"):
            return 0
    except PackageNotFoundError:
        return 0
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    present = len(glob.glob("/dev/nvidia[0-9]*"))
    if chosen is None or present == 0:
        return present
    names = [name.strip() for name in chosen.split(",")]
    return len(names[: names.index("-1")] if "-1" in names else [name for name in names if name])


def _warnings(
    config: TrainConfig, world_size: int, nproc: int, device: str, memory: Memory | None, facts: Facts | None
) -> list[str]:
    found = []
    batch, shares = config.trainer.batch_size, data_parallel_size(config.backend, world_size)
    kind = "processes" if shares == world_size else "data-parallel shares"
    said = f"trainer.batch_size={batch}"
    if isinstance(config.rollout, SingleTurnConfig):
        batch *= config.rollout.num_generations
        said += f" x rollout.num_generations={config.rollout.num_generations} = {batch} rows"
    if shares > batch:
        found.append(f"{said} is less than {shares} {kind}: {shares - batch} of them stay idle")
    elif batch % shares:
        found.append(f"{said} does not divide by {shares} {kind}: some have a row more than others")
    found += megatron_notes(config, world_size)
    found += _many_processes(world_size // nproc, nproc, device)
    here = device == "cpu" and world_size == nproc
    if here and memory is not None and memory.total * nproc > available_bytes():
        found.append(
            f"the estimate, {nproc} x {memory.total / GIB:.1f} GiB, is more than the {available_bytes() / GIB:.1f} GiB of this "
            "machine: lower data.max_length or trainer.micro_batch_size, or set backend."
            + ("recompute=full" if isinstance(config.backend, MegatronBackendConfig) else "gradient_checkpointing=true")
        )
    if facts is None:
        found.append(f"{config.model.path} is not in the local cache: it is downloaded at the start, and checked then")
    return found


def _many_processes(nodes: int, nproc: int, device: str) -> Iterator[str]:
    """More on a machine than seems meant. With launch.gpu, or GPUs that are visible, that is refused."""
    if device == "cuda" and nproc > PER_MACHINE:
        yield f"launch.nproc_per_node={nproc} is more than the {PER_MACHINE} GPUs that a machine usually has"
    cores = len(os.sched_getaffinity(0))
    if device == "cpu" and nodes == 1 and nproc > _PER_CORE * cores:
        yield f"{nproc} processes on {cores} CPU core{'s' * (cores > 1)}: they wait for each other"


# --- printing -------------------------------------------------------------------------------------------------------


def print_plan(plan: RunPlan, cfg: DictConfig | TrainConfig) -> None:
    """One screen for a person: what runs where, on what, and where the results go."""
    from rich.console import Console
    from rich.panel import Panel
    from rich.table import Table

    config = cfg if isinstance(cfg, TrainConfig) else to_object(cfg)
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, text in _rows(plan, config):
        table.add_row(name, text)
    console = Console(highlight=False, markup=False, soft_wrap=False)
    console.print(Panel(table, title="run plan", title_align="left", expand=False))
    for warning in plan.warnings:
        console.print(f"note: {warning}", style="yellow")
    if _has_job_plan(plan, config):
        from twinkle_research.config.jobplan.report import job_table

        console.print(job_table(plan, config))


def _has_job_plan(plan: RunPlan, config: TrainConfig) -> bool:
    """Whether a second table says what the processes need and send: for GPUs that are named, and before there are several."""
    return plan.facts is not None and (plan.hardware is not None or (config.dry_run and plan.world_size > 1))


def _rows(plan: RunPlan, config: TrainConfig) -> list[tuple[str, str]]:
    optimizer, scheduler = config.optimizer, config.scheduler
    tracking = config.tracking
    rows = [
        ("model", _model_text(plan, config)),
        ("adapter", _adapter_text(plan, config)),
        ("data", _data_text(config.data)),
        ("task", f"{config.loss.name} ({config.trainer.name}), {optimizer.name} lr {optimizer.lr:g}, {scheduler.name} schedule"),
        ("length", _length_text(config)),
        ("batch", _batch_text(plan, config)),
        ("processes", f"{plan.layout} on {plan.device} ({config.backend.name} backend)"),
    ]
    if isinstance(config.rollout, SingleTurnConfig):
        rows.insert(-1, ("rollout", _rollout_text(plan, config)))
    if plan.memory is not None and not _has_job_plan(plan, config):
        rows.append(("memory", plan.memory.text()))
    every = "at the end" if config.checkpoint.every is None else f"every {config.checkpoint.every} steps and at the end"
    shown = ["metrics.jsonl", *(["tensorboard"] if tracking.tensorboard else []), *(["report.html"] if tracking.report else [])]
    rows += [
        ("run folder", _folder_text(config)),
        ("checkpoints", f"{every}, {config.checkpoint.format.value}, the newest {config.checkpoint.keep} stay"),
        ("records", f"{', '.join(shown)}; W&B {_wandb_text(config)}"),
        ("seed", str(config.seed)),
    ]
    return rows


def _model_text(plan: RunPlan, config: TrainConfig) -> str:
    source = config.model.path or config.model.hub_id
    name = f"{config.model.name} ({source})" if source else config.model.name
    size = "" if plan.parameters is None else f", {count(plan.parameters)} parameters"
    return f"{name}{size}, {config.model.dtype.name}"


def _adapter_text(plan: RunPlan, config: TrainConfig) -> str:
    trained = "" if plan.trainable is None else f"{count(plan.trainable)} trained"
    if config.adapter.name == "none":
        return f"none: all weights are trained ({trained})" if trained else "none: all weights are trained"
    adapter = config.adapter
    return f"{adapter.name}, rank {adapter.r}, alpha {adapter.alpha:g}, on {', '.join(adapter.target_modules)}; {trained}".rstrip(
        "; "
    )


def _data_text(data: CommonDataConfig) -> str:
    if isinstance(data, GeneratedDataConfig):
        return f"{data.name}: made here (data.seed={data.seed}); rows of at most {data.max_length} tokens"
    names = [source.path or source.dataset_id for _, source in sources_of(data)]
    if isinstance(data, MixDataConfig):
        total = sum(source.weight for source in data.sources)
        names = [f"{name} ({source.weight / total:.3g})" for name, source in zip(names, data.sources, strict=True)]
    streamed = isinstance(data, DataConfig) and data.streaming
    how = "streamed rows" if streamed else "rows"
    return f"{data.name}: {', '.join(map(str, names))}; {how} of at most {data.max_length} tokens"


def _length_text(config: TrainConfig) -> str:
    trainer = config.trainer
    limits = []
    if trainer.max_steps is not None:
        limits.append(f"{trainer.max_steps} optimizer step{'s' * (trainer.max_steps > 1)}")
    if trainer.epochs is not None or trainer.max_steps is None:
        epochs = trainer.epochs or 1
        limits.append(f"{epochs} epoch{'s' * (epochs > 1)}")
    evaluated = config.data.sample_prompts or eval_path_of(config.data) or config.data.eval_rows
    often = "" if trainer.eval_every is None else f", every {trainer.eval_every} steps"
    evaluation = f"; evaluated before{often} and after" if evaluated else ""
    return " or ".join(limits) + (", whichever ends first" if len(limits) > 1 else "") + evaluation


def _batch_text(plan: RunPlan, config: TrainConfig) -> str:
    trainer = config.trainer
    rows, text = trainer.batch_size, f"{trainer.batch_size} {'pairs' if config.data.pairs else 'rows'} a step"
    if isinstance(config.rollout, SingleTurnConfig):
        rows *= config.rollout.num_generations
        text = f"{trainer.batch_size} prompts x {config.rollout.num_generations} completions a step"
    shares = data_parallel_size(config.backend, plan.world_size)
    share = -(-rows // shares)
    if shares > 1:
        kind = "processes" if shares == plan.world_size else "shares"
        text += f" = {shares} {kind} x {share if rows % shares == 0 else f'at most {share}'}"
    if trainer.micro_batch_tokens is not None:
        how = "packed into rows" if config.data.packing else "in micro-batches"
        return f"{text}, {how} of at most {trainer.micro_batch_tokens} tokens (a longer row is one of its own)"
    size = min(trainer.micro_batch_size or 1, share)
    return f"{text}, in {-(-share // size)} micro-batch{'es' * (share > size)} of {size}"


def _rollout_text(plan: RunPlan, config: TrainConfig) -> str:
    trainer, rollout, sampler = config.trainer, config.rollout, config.sampler
    choice = chosen_sampler(sampler, model_facts(config.model), plan.device == "cpu")
    steps = trainer.inner_epochs * rollout.prompts_per_step // trainer.batch_size
    drawn = f"temperature {sampler.temperature:g}"
    drawn += f", top_p {sampler.top_p:g}" if sampler.top_p < 1 else ""
    drawn += f", top_k {sampler.top_k}" if sampler.top_k else ""
    used = "trained on once" if steps == 1 else f"for {steps} optimizer steps"
    return (
        f"{rollout.prompts_per_step} prompts by the {choice}, {drawn}, at most {sampler.max_tokens} tokens each, "
        f"{used}; reward {config.reward.name}, advantage {config.advantage.name}"
    )


def _folder_text(config: TrainConfig) -> str:
    if config.run_dir is None:
        return "a new one under runs/"
    continues = not config.eval_only and (Path(config.run_dir) / FILE_NAME).is_file()
    return config.run_dir + (" (holds a run, which continues)" if continues else "")


def _wandb_text(config: TrainConfig) -> str:
    wandb = config.tracking.wandb
    mode = resolve_mode(wandb)
    if mode is WandbMode.disabled:
        return "off" if wandb.mode is WandbMode.disabled else "off (no key found)"
    return f"{mode.name}, project {wandb.project}"


def count(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)
