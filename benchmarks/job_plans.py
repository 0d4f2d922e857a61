"""Layouts for models of 0.6 to 235 billion parameters on 8 to 4,096 GPUs, from the plan's formulas: nothing is run.

    python benchmarks/job_plans.py        # writes benchmarks/results/job_plans.md

Each is the nearest to plain data parallelism with a distributed optimizer that fits (config/jobplan/fit.py).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from twinkle_research.config import compose, to_object  # noqa: E402
from twinkle_research.config.jobplan.fit import fits, nearest_fit  # noqa: E402
from twinkle_research.config.jobplan.flow import Flow  # noqa: E402
from twinkle_research.config.jobplan.hardware import PER_MACHINE, hardware_of  # noqa: E402
from twinkle_research.config.jobplan.memory import Memory, estimate  # noqa: E402
from twinkle_research.config.jobplan.step import StepTime, idle_share, step_time  # noqa: E402
from twinkle_research.config.jobplan.traffic import flows  # noqa: E402
from twinkle_research.config.jobplan.workload import Workload, workload  # noqa: E402
from twinkle_research.config.layouts import layout_text  # noqa: E402
from twinkle_research.distributed.gpus import GIB  # noqa: E402
from twinkle_research.model.prepare import model_facts  # noqa: E402
from twinkle_research.trainer.config import TrainConfig  # noqa: E402

MODELS = (
    "qwen3_0_6b", "qwen3_1_7b", "qwen3_4b", "qwen3_8b", "qwen3_14b", "qwen3_32b", "llama3_1_70b", "qwen3_30b_a3b",
    "qwen3_235b_a22b",
)  # fmt: skip
GPUS = (8, 64, 512, 4096)
WORDS = (
    "backend=megatron", "backend.distributed_optimizer=true", "loss=grpo", "loss.beta=0.01", "adapter=none", "sampler=vllm",
    "data.max_length=1024", "sampler.max_tokens=3072", "rollout.num_generations=8", "trainer.micro_batch_size=1",
    "launch.gpu=h100_80gb", "dry_run=true",
)  # fmt: skip
COLUMNS = (
    "model", "GPUs", "layout", "weights", "gradients", "optimizer", "reference", "activations", "engine, KV cache",
    "all in training, sampling", "tokens a step", "pipeline idle", "sent in a machine", "between machines",
    "seconds: computing, sending, sampling",
)  # fmt: skip
OUT = Path(__file__).parent / "results" / "job_plans.md"


class Plan(NamedTuple):
    """What fits on ``gpus``; None where nothing does, and ``instead`` the number of GPUs on which something would."""

    model: str
    gpus: int
    config: TrainConfig | None
    memory: Memory | None
    instead: int | None
    work: Workload | None = None
    moved: list[Flow] = []
    time: StepTime | None = None


def plan(model: str, gpus: int) -> Plan:
    """As many prompts in a step as there are GPUs, so that each share has rows enough."""
    config = to_object(compose([*WORDS, f"model={model}", f"trainer.batch_size={max(64, gpus)}"]))
    nodes = gpus // PER_MACHINE
    config.launch.nodes, config.launch.nproc_per_node = nodes, PER_MACHINE
    facts, hardware = model_facts(config.model), hardware_of(config.launch)
    memory = estimate(config, facts, gpus, hardware, on_cpu=False)
    if not fits(memory, config, hardware):
        found = nearest_fit(config, facts, hardware, nodes, PER_MACHINE)
        if found is None or found.nodes != nodes:
            return Plan(model, gpus, None, None, None if found is None else found.nodes * PER_MACHINE)
        config, memory = found.config, found.memory
    work, moved = workload(config, gpus), flows(config, facts, gpus, PER_MACHINE)
    return Plan(model, gpus, config, memory, None, work, moved, step_time(config, facts, work, memory, moved, gpus, hardware))


def rows() -> Iterator[str]:
    yield "| " + " | ".join(COLUMNS) + " |"
    yield "|---" * len(COLUMNS) + "|"
    for model in MODELS:
        for gpus in GPUS:
            yield row(plan(model, gpus))


def row(found: Plan) -> str:
    if found.config is None:
        instead = "no layout" if found.instead is None else f"none fits: {found.instead} are needed"
        return f"| {found.model} | {found.gpus} | {instead} |" + " |" * (len(COLUMNS) - 3)
    memory, config = found.memory, found.config
    gib = [memory.weights, memory.gradients, memory.optimizer, memory.reference, memory.activations]
    cells = [found.model, str(found.gpus), layout(config, found.gpus), *(f"{size / GIB:.1f}" for size in gib)]
    cells.append(f"{memory.sampler.weights / GIB:.1f}, {memory.sampler.cache / GIB:.1f}")
    cells.append(f"{memory.training / GIB:.0f}, {memory.sampling / GIB:.0f}")
    cells.append(f"{found.work.tokens / 1e6:.3g} M")
    cells.append(f"{idle_share(config, found.work):.0%}")
    cells += [f"{sum(getattr(flow, part) for flow in found.moved) / GIB:.1f}" for part in ("node", "network")]
    time = found.time
    cells.append(f"{time.total:.3g}: {time.compute:.2g}, {time.communication:.2g}, {time.sampling:.3g}")
    return "| " + " | ".join(cells) + " |"


def layout(config: TrainConfig, gpus: int) -> str:
    text = layout_text(config.backend, 1, gpus)
    if config.backend.recompute.name != "none":
        text += f", recompute {config.backend.recompute.name}"
    sampler = config.sampler
    text += f"; engine of {sampler.tensor_parallel}" if sampler.tensor_parallel > 1 else ""
    return text + f", {sampler.gpu_memory_utilization:g} of a GPU"


ABOUT = """# Layouts that fit, by the plan's formulas

Made by `python benchmarks/job_plans.py`; nothing was run. GRPO on all weights in bfloat16 with float32 masters and a frozen
reference; prompts of up to 1,024 tokens with 8 completions of up to 3,072 each, as many prompts in a step as GPUs (at
least 64), one row in a pass; machines of {machine} H100 ({memory:.0f} GiB, {flops:.0f} TFLOP/s, {node:.0f} GB/s within a
machine, {network:.0f} GB/s between them).

Each layout is the nearest to plain data parallelism with a distributed optimizer that fits. Memory and what is sent in a
step are in GiB of the GPU that has most. Seconds of a step are the least possible: computing at the peak of the data sheet,
sending what is not hidden, sampling as fast as weights and cache are read; with what a pipeline waits.

"""


def document() -> str:
    gpu = hardware_of(to_object(compose(list(WORDS))).launch)
    about = ABOUT.format(
        machine=PER_MACHINE, memory=gpu.memory / GIB, flops=gpu.flops / 1e12, node=gpu.node / 1e9, network=gpu.network / 1e9
    )
    return about + "\n".join(rows()) + "\n"


if __name__ == "__main__":
    OUT.write_text(document())
    print(f"wrote {OUT.relative_to(ROOT)}")
