"""Runs the cases of equality_cases.py: each is twenty optimizer steps in a layout, compared with those that transformers does
in one process. Each process of a launch (see ranks.py) leaves the distances that it measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from equality_cases import ADAPTERS, LAYOUTS, TASKS, Call, Case, Task, epochs
from safetensors.torch import load_file, save_file
from torch import Tensor

from twinkle_research.distributed.runtime import Runtime
from twinkle_research.model.config import LoraAdapterConfig
from twinkle_research.model.megatron.config import MegatronBackendConfig, Recompute
from twinkle_research.model.megatron.model import MegatronModel
from twinkle_research.model.saving import SavingMixin
from twinkle_research.model.transformers import TransformersModel
from twinkle_research.processor.base import InputProcessor
from twinkle_research.randomness import derive_seed

PROCESSORS = {"padded": InputProcessor("left", micro_batch_size=2), "packed": InputProcessor(packing=True, micro_batch_tokens=28)}
# Adam divides a gradient by its size plus eps: where the size is that of rounding errors (1e-8 here), a far smaller eps would
# make updates of full size out of them. Weight decay is large, so that what must not be decayed shows.
OPTIMIZER = {"lr": 1e-3, "eps": 1e-5, "weight_decay": 0.1}


# --- twenty steps, the same on both backends ----------------------------------------------------------------------------


def set_up(model: SavingMixin, task: Task, adapter: str, processor: InputProcessor, accumulation: int) -> None:
    dropout = ADAPTERS[adapter]
    if dropout is None:
        model.start_training(accumulation)
    else:
        config = LoraAdapterConfig(r=4, alpha=8, dropout=dropout)
        model.add_adapter_to_model("default", config, gradient_accumulation_steps=accumulation)
    if task.critic:
        model.add_value_head()
    if task.reference:
        model.set_reference("frozen" if dropout is None else "base")
    model.set_processor(processor)
    model.set_loss(task.loss, **task.options)
    model.set_optimizer("AdamW", **OPTIMIZER)
    model.set_lr_scheduler("cosine", total_steps=24)


def record(model: TransformersModel, task: Task, seed: int) -> list[list[dict[str, list]]]:
    """The rollouts' side of the rows of each call: a policy that was close to the model as it is before the first step, and
    what came of its answers."""
    generator = torch.Generator().manual_seed(derive_seed(seed, "recorded"))

    def noise(values: list[float], size: float) -> list[float]:
        return (torch.tensor(values) + size * torch.randn(len(values), generator=generator)).tolist()

    def inputs(call: Call) -> dict[str, list]:
        scores = model.policy_scores(call)
        zeros = [[0.0] * len(row) for row in scores["logps"]]
        made = {
            "advantages": noise([0.0] * len(call), 1.0),
            "old_logps": [noise(row, 0.1) for row in scores["logps"]],
            "old_values": [noise(row, 0.1) for row in scores.get("values", zeros)],
            "returns": [noise(row, 1.0) for row in zeros],
        }
        return {name: made[name] for name in task.reads}

    return [[inputs(call) for call in calls] for calls in epochs(task, seed)]


@dataclass
class Trace:
    """``metrics``: of each optimizer step. ``logps``, ``values``: of each call, this process's share of the rows."""

    metrics: list[dict[str, float]] = field(default_factory=list)
    logps: list[list[list[float]]] = field(default_factory=list)
    values: list[list[list[float]]] = field(default_factory=list)


def share(model: SavingMixin, items: list, together: int) -> list:
    """Every so manieth group of rows that belong together."""
    rank, size = model.data_parallel
    return [item for i, item in enumerate(items) if i // together % size == rank]


def windows(calls: list[Call], recorded: list[dict[str, list]]) -> Iterator[list[tuple[Call, dict[str, list]]]]:
    both = list(zip(calls, recorded, strict=True))
    yield both[:2]
    yield both[2:]


def joined(window: list[tuple[Call, dict[str, list]]]) -> tuple[Call, dict[str, list]]:
    rows = [row for call, _ in window for row in call]
    return rows, {name: [value for _, given in window for value in given[name]] for name in window[0][1]}


def train(model: SavingMixin, task: Task, recorded: list[list[dict[str, list]]], seed: int, steps: int) -> Trace:
    """Each second epoch leaves it to the optimizer step to divide by the window's normaliser, and does not clip."""
    trace = Trace()
    in_parts = model.training_state().gradient_accumulation_steps > 1
    for epoch, (calls, given) in enumerate(zip(epochs(task, seed), recorded, strict=True)):
        clip = None if epoch % 2 else 0.3
        for window in windows(calls, given):
            if len(trace.metrics) == steps:
                return trace
            every, _ = joined(window)
            divisor = None if epoch % 2 else model.count(share(model, every, task.together))
            for rows, inputs in window if in_parts else [joined(window)]:
                own = {name: share(model, values, task.together) for name, values in inputs.items()}
                call(model, share(model, rows, task.together), task, own, divisor, trace)
                model.clip_grad_and_step(clip)
            if in_parts and len(window) == 1:
                model.finish_window(clip)
            trace.metrics.append(model.calculate_metric(is_training=True).result)
    return trace


def call(model: SavingMixin, rows: Call, task: Task, inputs: dict[str, list], divisor: float | None, trace: Trace) -> None:
    if task.reference:
        inputs |= {"ref_logps": model.reference_logps(rows)}
    done = model.forward_backward(rows, normalizer=divisor, **inputs).result
    trace.logps.append(done["logps"])
    trace.values.append(done.get("values", []))


# --- with transformers --------------------------------------------------------------------------------------------------


def reference(folder: Path, case: Case, stem: Path, seed: int) -> None:
    task = TASKS[case.task]
    model = TransformersModel(folder, seed=seed)
    set_up(model, task, case.adapter, InputProcessor(micro_batch_size=3), 2)
    recorded = record(model, task, seed)
    trace = train(model, task, recorded, seed, 20)
    save_file({name: tensor.detach().contiguous() for name, tensor in weights(model, case.adapter)}, f"{stem}.safetensors")
    Path(f"{stem}.json").write_text(json.dumps({"recorded": recorded, **vars(trace)}))


def weights(model: SavingMixin, adapter: str) -> Iterator[tuple[str, Tensor]]:
    """All of the model, an adapter merged, and the adapter itself."""
    yield from ((name, tensor.clone()) for name, tensor in model.disk_weights())
    if ADAPTERS[adapter] is not None:
        yield from model.get_state_dict().items()


# --- in a layout --------------------------------------------------------------------------------------------------------


@dataclass
class Gaps:
    """The largest distances from what transformers found: of losses and of tokens' scores absolute, of gradient norms
    relative, of weights absolute and (L2 norm over the whole model) relative, of other metrics relative where they exceed 1."""

    loss: float = 0.0
    grad_norm: float = 0.0
    logps: float = 0.0
    values: float = 0.0
    metrics: float = 0.0
    weights: float = 0.0
    weights_l2: float = 0.0

    def note(self, name: str, gap: float) -> None:
        setattr(self, name, gap if not gap <= getattr(self, name) else getattr(self, name))  # NaN stays


# What backends promise, and what comes out where nothing is wrong, with some room.
PROMISED = {"loss": 1e-5, "logps": 1e-5, "values": 1e-5, "grad_norm": 1e-4, "metrics": 1e-4, "weights": 1e-4, "weights_l2": 1e-4}
MEASURED = {"loss": 5e-6, "logps": 5e-6, "values": 5e-6, "grad_norm": 5e-6, "metrics": 5e-6, "weights": 1e-5, "weights_l2": 1e-6}


def build(runtime: Runtime, folder: Path, case: Case, seed: int) -> MegatronModel:
    options = LAYOUTS[runtime.world_size][case.layout]
    layout = MegatronBackendConfig(recompute=Recompute[case.recompute], **options)
    return MegatronModel(folder, layout=layout, seed=seed, runtime=runtime)


def measure(runtime: Runtime, folder: Path, case: Case, expected: Path, seed: int, steps: int = 20) -> Gaps:
    task, stored = TASKS[case.task], json.loads((expected / f"{case.reference}.json").read_text())
    model = build(runtime, folder, case, seed)
    in_parts = not model.mesh.layout.overlap_grad_reduce
    set_up(model, task, case.adapter, PROCESSORS[case.packing], 2 if in_parts else 1)
    trace = train(model, task, stored["recorded"], seed, steps)
    gaps = Gaps()
    for step, (found, wanted) in enumerate(zip(trace.metrics, stored["metrics"], strict=steps == 20)):
        compare_metrics(step, found, wanted, gaps)
    for name in ("logps", "values"):
        compare_scores(model, task, getattr(trace, name), stored[name], in_parts, name, gaps)
    if steps == 20:
        compare_weights(weights(model, case.adapter), load_file(expected / f"{case.reference}.safetensors"), gaps)
    model.close()
    return gaps


def is_tie(step: int, name: str) -> bool:
    """Before the first update the policy is its reference: which answer it prefers is a matter of rounding."""
    return step == 0 and name == "rewards/accuracies"


def compare_metrics(step: int, found: dict[str, float], wanted: dict[str, float], gaps: Gaps) -> None:
    assert found.keys() == wanted.keys()
    gaps.note("loss", abs(found["loss"] - wanted["loss"]))
    gaps.note("grad_norm", abs(found["grad_norm"] / wanted["grad_norm"] - 1))
    for name in found.keys() - {"loss", "grad_norm"}:
        if is_tie(step, name):
            continue
        gaps.note("metrics", abs(found[name] - wanted[name]) / max(1.0, abs(wanted[name])))


def compare_scores(model: MegatronModel, task: Task, found: list, wanted: list, in_parts: bool, name: str, gaps: Gaps) -> None:
    if not in_parts:
        wanted = [wanted[i] if i % 3 == 2 else wanted[i] + wanted[i + 1] for i in range(len(wanted)) if i % 3 != 1]
    for rows, others in zip(found, wanted, strict=False):
        others = share(model, others, task.together)
        assert [len(row) for row in rows] == [len(row) for row in others]
        for row, other in zip(rows, others, strict=True):
            gaps.note(name, max(abs(a - b) for a, b in zip(row, other, strict=True)))


def compare_weights(found: Iterable[tuple[str, Tensor]], wanted: dict[str, Tensor], gaps: Gaps) -> None:
    names, difference, size = set(), 0.0, 0.0
    for name, tensor in found:
        names.add(name)
        gap = (tensor - wanted[name]).double()
        gaps.note("weights", float(gap.abs().max()))
        difference, size = difference + float(gap.square().sum()), size + float(wanted[name].double().square().sum())
    assert names == wanted.keys(), names ^ wanted.keys()
    gaps.note("weights_l2", (difference / size) ** 0.5)


# --- a launch -----------------------------------------------------------------------------------------------------------


def references(runtime: Runtime, folders: Path, cases: list[Case], expected: Path, seed: int) -> None:
    """Those that are not there yet, dealt to the processes."""
    wanted = {case.reference: case for case in cases if not (expected / f"{case.reference}.json").exists()}
    for name in sorted(wanted)[runtime.rank :: runtime.world_size]:
        reference(folders / wanted[name].model, wanted[name], expected / name, seed)
    runtime.barrier()


def main(runtime: Runtime, folders: str, expected: str, out: str, cases: str, seed: str = "0") -> None:
    """``cases``: a JSON file with the options of each case."""
    todo = [Case(**options) for options in json.loads(Path(cases).read_text())]
    references(runtime, Path(folders), todo, Path(expected), int(seed))
    found = {}
    for case in todo:
        found[str(case)] = vars(measure(runtime, Path(folders) / case.model, case, Path(expected), int(seed)))
    Path(out, f"{runtime.world_size}-{runtime.rank}.json").write_text(json.dumps(found))
