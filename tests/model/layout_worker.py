"""What the tests of test_layouts.py compare: training, resuming and loading under each layout (see ranks.py).

Both ranks also run things in one process, half of them each.
"""

import json
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
from data_parallel_worker import build, share
from safetensors.torch import load_file, save_file
from tiny_models import make_rows

from twinkle_research.distributed.runtime import Runtime
from twinkle_research.errors import ConfigError
from twinkle_research.model.transformers import TransformersModel
from twinkle_research.model.transformers.state import TransformersState

LAYOUTS = ("none", "ddp", "fsdp2")


# --- one update, however it is computed ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    lora: bool
    packing: bool
    by_hand: bool
    checkpointing: bool
    layout: str

    def __str__(self) -> str:
        words = ("lora" if self.lora else "full", "packed" if self.packing else "padded", "hand" if self.by_hand else "step")
        return "-".join((*words, "checkpointing" if self.checkpointing else "plain", self.layout))


# Half of the 16 combinations, in which each three of the four take all of their values together; in each layout.
CASES = [
    Case(lora, packing, by_hand, lora ^ packing ^ by_hand, layout)
    for lora, packing, by_hand, layout in product((False, True), (False, True), (False, True), LAYOUTS)
]
REFERENCES = [Case(lora, False, by_hand, False, "none") for lora in (False, True) for by_hand in (False, True)]


def epoch(seed: int) -> list[list[dict]]:
    """Five global batches. Of two ranks the second has no trained token in one, no row in another, one row more or less in
    others; windows of two leave the last batch over."""
    batches = [make_rows(count, seed=10 * seed + i) for i, count in enumerate((5, 6, 1, 4, 3))]
    batches[1] = [row | {"labels": [-100] * row["length"]} if j % 2 else row for j, row in enumerate(batches[1])]
    return batches


def train(model: TransformersModel, case: Case) -> tuple[dict, dict, list[dict]]:
    """Weights after the first update, weights at the end, metrics of each update."""
    first, metrics = None, []
    for batches in (epoch(1), epoch(2)):
        for rows in batches:
            own = share(model, rows)
            model.forward_backward(own, normalizer=None if case.by_hand else model.count(own))
            model.clip_grad_and_step()
            if model.training_state().window.calls == 0:
                metrics.append(model.calculate_metric(is_training=True).result)
                first = first or model.get_state_dict()
        if model.training_state().window.calls:
            model.finish_window()
            metrics.append(model.calculate_metric(is_training=True).result)
    return first, model.get_state_dict(), metrics


def run_case(case: Case, folder: str, runtime: Runtime, out: Path) -> None:
    sharding = "auto" if case.layout == "none" else case.layout
    model = build(
        folder, runtime, sharding, lora=case.lora, by_hand=case.by_hand, checkpointing=case.checkpointing, packing=case.packing
    )
    first, last, metrics = train(model, case)
    stem = out / f"{case}-{runtime.rank}"
    save_file(first, f"{stem}-first.safetensors")
    save_file(last, f"{stem}-last.safetensors")
    Path(f"{stem}.json").write_text(json.dumps(metrics))


def matrix(runtime: Runtime, folder: str, out: Path) -> None:
    alone = [case for case in dict.fromkeys([*CASES, *REFERENCES]) if case.layout == "none"]
    for case in alone[runtime.rank :: 2]:
        run_case(case, folder, Runtime(), out)
    for case in CASES:
        if case.layout != "none":
            run_case(case, folder, runtime, out)


# --- saved under one layout, continued under another --------------------------------------------------------------------

KINDS = list(product((False, True), ("float32", "bfloat16")))  # lora, dtype
STEPS = 5


def kind_name(lora: bool, dtype: str) -> str:
    return f"{'lora' if lora else 'full'}-{dtype}"


def place(layout: str, runtime: Runtime) -> tuple[Runtime, str]:
    return (Runtime(), "auto") if layout == "none" else (runtime, layout)


def steps(model: TransformersModel, seeds: range) -> list[dict]:
    metrics = []
    for seed in seeds:
        own = share(model, make_rows(5, seed=seed))
        model.forward_backward(own, normalizer=model.count(own))
        model.clip_grad_and_step()
        metrics.append(model.calculate_metric(is_training=True).result)
    return metrics


def everything(model: TransformersModel) -> dict[str, torch.Tensor]:
    """Weights, masters and moments, whole, under the names on disk. Collective."""
    state, training = TransformersState(model), model.training_state()
    found = model.get_state_dict()
    slots: dict[str, dict[str, torch.Tensor]] = {}
    for name, slot, tensor in training.optimizer.state():
        slots.setdefault(slot, {})[name] = tensor
    for slot, tensors in slots.items():
        whole = state.names.to_disk(lambda name, own=tensors: training.layout.whole(name, own[name]), tensors)
        found |= {f"{name}.{slot}": tensor.clone() for name, tensor in whole}
    return found


def keep(model: TransformersModel, metrics: list[dict], stem: Path, runtime: Runtime) -> None:
    tensors = everything(model)
    if runtime.is_main or model.runtime.world_size == 1:
        save_file(tensors, f"{stem}.safetensors")
        Path(f"{stem}.json").write_text(json.dumps(metrics))


def with_momentum(folder: str, layout: str, runtime: Runtime, lora: bool, dtype: str, packing: bool) -> TransformersModel:
    where, sharding = place(layout, runtime)
    model = build(folder, where, sharding, lora=lora, dtype=dtype, packing=packing)
    model.set_lr_scheduler("cosine", total_steps=12, warmup_steps=2)
    return model


def resumes(runtime: Runtime, folder: str, out: Path) -> None:
    """Three steps and five more without a stop, under each layout; then the five from each checkpoint under each layout."""
    for i, (lora, dtype) in enumerate(KINDS):
        name = kind_name(lora, dtype)
        for written in LAYOUTS:
            if written != "none" or i % 2 == runtime.rank:
                model = with_momentum(folder, written, runtime, lora, dtype, packing=False)
                steps(model, range(3))
                model.save(f"{name}-{written}", str(out), save_optimizer=True)
                keep(model, steps(model, range(3, 3 + STEPS)), out / f"{name}-{written}-whole", runtime)
    runtime.barrier()
    pairs = list(product(KINDS, LAYOUTS, LAYOUTS))
    for i, ((lora, dtype), written, read) in enumerate(pairs):
        name = kind_name(lora, dtype)
        if read == "none" and i // len(LAYOUTS) % 2 != runtime.rank:
            continue
        model = with_momentum(folder, read, runtime, lora, dtype, packing=written != read)
        model.resume_from_checkpoint(out / f"{name}-{written}")
        keep(model, steps(model, range(3, 3 + STEPS)), out / f"{name}-{written}-{read}", runtime)


# --- every architecture -------------------------------------------------------------------------------------------------


def architectures(runtime: Runtime, folders: Path, out: Path) -> None:
    """Each as from_pretrained loads it; two steps; saved, and read again."""
    for folder in sorted(folders.iterdir()):
        for dtype in ("bfloat16", "float32"):
            model = with_optimizer(TransformersModel(folder, dtype=dtype, runtime=runtime, sharding="fsdp2"))
            expected = TransformersModel(folder, dtype=dtype)
            assert same(model.get_state_dict(), expected.get_state_dict()), folder.name
            assert same(dict(model.module.named_buffers()), dict(expected.module.named_buffers())), folder.name
        metrics = steps(model, range(2))
        model.save(folder.name, str(out), save_optimizer=True)
        again = with_optimizer(TransformersModel(folder, runtime=runtime, sharding="fsdp2"))
        again.resume_from_checkpoint(out / folder.name)
        assert same(everything(model), everything(again)), folder.name
        keep(model, metrics, out / f"{folder.name}-stepped", runtime)


def with_optimizer(model: TransformersModel) -> TransformersModel:
    model.set_processor("InputProcessor", micro_batch_size=2)
    model.set_optimizer("AdamW", lr=1e-2, eps=1e-3)
    return model


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


def refusals(runtime: Runtime, folder: str, out: Path) -> None:
    try:
        TransformersModel(folder, runtime=runtime, sharding="fsdp2").set_optimizer("Muon")
    except ConfigError as error:
        (out / str(runtime.rank)).write_text(str(error))


def main(runtime: Runtime, folder: str, folders: str, out: str) -> None:
    parts = [(matrix, folder), (resumes, folder), (architectures, Path(folders)), (refusals, folder)]
    for part, source in parts:
        (Path(out) / part.__name__).mkdir(exist_ok=True)
        part(runtime, source, Path(out) / part.__name__)
        runtime.barrier()


def metrics_of(stem: Path) -> list[dict]:
    return json.loads(Path(f"{stem}.json").read_text())


def tensors_of(stem: Path) -> dict[str, torch.Tensor]:
    return load_file(f"{stem}.safetensors")
