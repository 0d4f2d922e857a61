"""The plan of a job as a table: layout, memory of each phase, a step's tokens, traffic and time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twinkle_research.config.jobplan.flow import KINDS, Flow
from twinkle_research.config.jobplan.step import idle_share, step_flops, step_time
from twinkle_research.config.jobplan.traffic import flows
from twinkle_research.config.jobplan.workload import Workload, workload
from twinkle_research.distributed.gpus import GIB, gib
from twinkle_research.model.megatron.config import MegatronBackendConfig
from twinkle_research.trainer.config import TrainConfig

if TYPE_CHECKING:
    from rich.console import RenderableType

    from twinkle_research.config.plan import RunPlan

WHAT = {
    "tensor": "tensor parallel", "context": "context parallel", "expert": "experts", "pipeline": "pipeline",
    "data": "gradients, weights", "sampler": "weights to the sampler",
}  # fmt: skip


def job_table(plan: RunPlan, config: TrainConfig) -> RenderableType:
    from rich.panel import Panel
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, text in job_rows(plan, config):
        table.add_row(name, text)
    where = f"{plan.world_size:,} {'GPUs' if plan.device == 'cuda' else 'processes'}"
    kind = f" ({plan.hardware.name})" if plan.hardware is not None else ""
    return Panel(table, title=f"job plan, {where}{kind}", title_align="left", expand=False)


def job_rows(plan: RunPlan, config: TrainConfig) -> list[tuple[str, str]]:
    work = workload(config, plan.world_size)
    moved = flows(config, plan.facts, plan.world_size, plan.nproc_per_node)
    rows = [("memory", _memory_text(plan))]
    if plan.memory.sampler.awake:
        rows.append(("sampling", _sampling_text(plan)))
    rows.append(("tokens a step", _tokens_text(config, work)))
    if isinstance(config.backend, MegatronBackendConfig) and config.backend.pipeline_parallel > 1:
        rows.append(("pipeline", _pipeline_text(config, work)))
    rows.append(("work a step", f"{step_flops(config, plan.facts, work) / plan.world_size / 1e12:,.4g} TFLOP a process"))
    for kind in KINDS:
        own = [flow for flow in moved if flow.kind == kind]
        if own:
            rows.append((WHAT[kind], _traffic_text(own, plan)))
    if plan.hardware is not None:
        rows.append(("time a step", _time_text(plan, config, work, moved)))
    return rows


def _memory_text(plan: RunPlan) -> str:
    memory = plan.memory
    parts = [("weights", memory.weights), ("gradients", memory.gradients), ("optimizer", memory.optimizer)]
    parts += [("reference", memory.reference)] if memory.reference else []
    parts += [("activations", memory.activations), ("sampler asleep", memory.sampler.asleep), ("libraries", memory.runtime)]
    text = ", ".join(f"{name} {gib(size)}" for name, size in parts if size)
    room = f" of {plan.hardware.memory / GIB:.4g}" if plan.hardware is not None else ""
    return f"{memory.training / GIB:.1f} GiB{room} a process while it trains: {text}"


def _sampling_text(plan: RunPlan) -> str:
    memory = plan.memory
    return f"{memory.sampling / GIB:.1f} GiB a process while it samples: {memory.sampler.text()}"


def _tokens_text(config: TrainConfig, work: Workload) -> str:
    together = "pairs" if config.data.pairs else "rows"
    text = f"at most {work.tokens:,} ({work.units:,} {together} of {work.unit_tokens:,}"
    if work.rollout_steps:
        text += f": a prompt of {config.data.max_length:,}, a completion of {config.sampler.max_tokens:,}"
    text += f"); a share has {work.share_tokens:,} in {work.micro_batches:,} passes of at most {work.micro_tokens:,}"
    passes = "pass" if work.scored == 1 else "passes"
    return text + (f"; scored in {work.scored:g} forward {passes} before" if work.scored else "")


def _pipeline_text(config: TrainConfig, work: Workload) -> str:
    return (
        f"{config.backend.pipeline_parallel} stages, {work.micro_batches} micro-batches a step: each waits "
        f"{idle_share(config, work):.1%} of the time"
    )


def _traffic_text(own: list[Flow], plan: RunPlan) -> str:
    node, network = sum(flow.node for flow in own), sum(flow.network for flow in own)
    ops = ", ".join(dict.fromkeys(flow.op.replace("_", "-") for flow in own))
    text = f"{_amount(node)} within a machine, {_amount(network)} between machines, a process ({ops}"
    hidden = [flow for flow in own if flow.hidden]
    text += "; behind the passes" if len(hidden) == len(own) else "; partly behind the passes" if hidden else ""
    if plan.hardware is not None:
        text += f"; {sum(flow.seconds(plan.hardware) for flow in own):.3g} s"
    return text + ")"


def _amount(size: float) -> str:
    return f"{size / GIB:,.2f} GiB" if size >= 0.1 * GIB else f"{size / 2**20:,.2f} MiB" if size else "nothing"


def _time_text(plan: RunPlan, config: TrainConfig, work: Workload, moved: list[Flow]) -> str:
    time = step_time(config, plan.facts, work, plan.memory, moved, plan.world_size, plan.hardware)
    parts = [
        ("computing", time.compute),
        ("idle pipeline", time.idle),
        ("sending", time.communication),
        ("sampling", time.sampling),
    ]
    shown = ", ".join(f"{name} {seconds:.3g}" for name, seconds in parts if seconds)
    return f"at least {time.total:.3g} s, at the peaks of the data sheet ({shown})"
