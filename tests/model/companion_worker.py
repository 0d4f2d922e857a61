"""What the tests of test_companion_layouts.py compare: a value head and a reference under each layout (see ranks.py)."""

import json
from itertools import product
from pathlib import Path

import torch
from data_parallel_worker import share
from safetensors.torch import save_file
from test_value_head import LORA, SquaredError
from tiny_models import make_rows

from twinkle_research.distributed.runtime import Runtime
from twinkle_research.model import MultiLoraTransformersModel, TransformersModel

LAYOUTS = ("none", "ddp", "fsdp2")
CASES = [("full", "float32"), ("full", "bfloat16"), ("lora", "float32")]
SCORED = make_rows(5, seed=50)
HALFWAY = 2


def batches():
    """Of two ranks the second has no row in one step and no trained token in another."""
    steps = [make_rows(count, seed=count) for count in (7, 1, 4, 5)]
    steps[2] = [row | {"labels": [-100] * row["length"]} if i % 2 else row for i, row in enumerate(steps[2])]
    return [[row | {"target": i % 3 - 0.5} for i, row in enumerate(rows)] for rows in steps]


def build(folder, runtime, layout, kind, dtype="float32"):
    sharding = "auto" if layout == "none" else layout
    model = TransformersModel(folder, dtype=dtype, seed=3, runtime=runtime, sharding=sharding)
    if kind == "lora":
        model.add_adapter_to_model("default", LORA)
    model.add_value_head()
    with torch.no_grad():
        head = model.trained().value_head.linear.weight
        head.copy_(0.3 * torch.linspace(-1, 1, head.shape[1]))
    model.set_loss(SquaredError)
    model.set_processor("InputProcessor", micro_batch_size=2)
    model.set_optimizer("AdamW", lr=1e-2, eps=1e-3)
    model.set_reference("refreshed")
    return model


def train(model, steps):
    for rows in steps:
        own = share(model, rows)
        model.forward_backward(own, model.count(own), advantages=[row["target"] for row in own])
        model.reference_logps(own)  # with the gradients of a step at hand
        model.clip_grad_and_step()
    model.refresh_reference(rate=0.5)


def results(model):
    """Whole weights; and of this rank's rows, by their numbers, what critic and reference say."""
    own = share(model, SCORED)
    values = model.forward_only(own, advantages=[0.0] * len(own)).result["values"]
    said = {row["sample_index"]: pair for row, *pair in zip(own, values, model.reference_logps(own), strict=True)}
    head = {name: p.detach().clone() for name, p in model.trained().value_head.named().items()}
    return model.get_state_dict() | head, said


def write(path: Path, runtime: Runtime, found) -> None:
    weights, said = found
    save_file(weights, f"{path}-{runtime.rank}.safetensors")
    Path(f"{path}-{runtime.rank}.json").write_text(json.dumps(said))


def several_adapters(folder, runtime, layout, out: Path) -> None:
    """Together and each alone, under the same layout."""
    names, found = ("a", "b"), {}
    sharding = "auto" if layout == "none" else layout
    together = MultiLoraTransformersModel(folder, seed=3, runtime=runtime, sharding=sharding)
    alone = {name: TransformersModel(folder, seed=3, runtime=runtime, sharding=sharding) for name in names}
    for model, name in [(together, name) for name in names] + [(alone[name], name) for name in names]:
        model.add_adapter_to_model(name, LORA)
        model.set_reference("frozen" if name == "a" else "base", adapter_name=name)
        model.set_optimizer("AdamW", lr=1e-2, adapter_name=name)
    for number, rows in enumerate(batches()):
        for name in names:
            for model in (together, alone[name]):
                own = share(model, rows[number % 2 :] if name == "b" else rows)
                model.forward_backward(own, adapter_name=name)
                model.clip_grad_and_step(adapter_name=name)
    for name in names:
        for model, what in ((together, "together"), (alone[name], "alone")):
            said = model.reference_logps(share(model, SCORED), adapter_name=name)
            found[f"{name}-{what}"] = [said, {n: t.tolist() for n, t in model.get_state_dict(name).items()}]
    (out / f"adapters-{layout}-{runtime.rank}.json").write_text(json.dumps(found))


def main(runtime: Runtime, folder: str, out: str) -> None:
    out = Path(out)
    runtimes = {"none": Runtime(rank=0), "ddp": runtime, "fsdp2": runtime}
    for layout, (kind, dtype) in product(LAYOUTS, CASES):
        if layout == "none" and not runtime.is_main:
            continue
        model = build(folder, runtimes[layout], layout, kind, dtype)
        train(model, batches()[:HALFWAY])
        model.save(f"{layout}-{kind}-{dtype}", output_dir=str(out), save_optimizer=True)
        train(model, batches()[HALFWAY:])
        write(out / f"end-{layout}-{kind}-{dtype}", runtimes[layout], results(model))
    runtime.barrier()
    for source, target, kind in product(LAYOUTS, LAYOUTS, ("full", "lora")):
        if target == "none" and not runtime.is_main:
            continue
        model = build(folder, runtimes[target], target, kind)
        model.resume_from_checkpoint(out / f"{source}-{kind}-float32")
        train(model, batches()[HALFWAY:])
        write(out / f"resumed-{source}-{target}-{kind}", runtimes[target], results(model))
    for layout in ("ddp", "fsdp2"):
        several_adapters(folder, runtime, layout, out)
