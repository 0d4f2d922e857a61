"""One rank of the tests of two processes, ddp and fsdp2 (see ranks.py); the test itself runs the same scenarios in one."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tiny_models import make_rows

from twinkle_research.distributed.runtime import Runtime
from twinkle_research.model.base import NonFiniteLoss
from twinkle_research.model.config import LoraAdapterConfig
from twinkle_research.model.transformers import TransformersModel

SHARDINGS = ("ddp", "fsdp2")
MASKED = [row | {"labels": [-100] * row["length"]} for row in make_rows(4, seed=9)]
# name -> (options of the model, the global batches of the steps)
SCENARIOS = {
    "full": ({}, [make_rows(7, seed=s) for s in range(3)]),
    "lora_dropout_by_hand": (
        {"lora": True, "by_hand": True, "normalization": "sequence"},
        [make_rows(6, seed=s) for s in range(4)],
    ),
    "bfloat16": ({"dtype": "bfloat16"}, [make_rows(6, seed=s) for s in range(2)]),
    "bfloat16_lora": ({"dtype": "bfloat16", "lora": True}, [make_rows(6, seed=s) for s in range(2)]),
    "checkpointing": ({"checkpointing": True}, [make_rows(6, seed=s) for s in range(2)]),
    "checkpointing_lora": ({"checkpointing": True, "lora": True}, [make_rows(6, seed=s) for s in range(2)]),
    "masked_rank_lora": (
        {"lora": True, "micro": 1},
        [[make_rows(2)[0], MASKED[0], make_rows(2)[1], MASKED[1]] for _ in range(2)],
    ),
    # Rank 0 has the rows with even numbers.
    "masked_rank": ({}, [[make_rows(2)[0], MASKED[0], make_rows(2)[1], MASKED[1]] for _ in range(2)]),
    "uneven_micro_batches": ({"micro": 1}, [make_rows(3), make_rows(5)]),
    "empty_rank": ({}, [make_rows(1), make_rows(1, seed=1)]),
    "muon": ({"optimizer": "Muon"}, [make_rows(5, seed=s) for s in range(4)]),
    "muon_lora": ({"optimizer": "Muon", "lora": True}, [make_rows(5, seed=s) for s in range(4)]),
    "empty_rank_in_parts": ({"parts": True}, [make_rows(1), make_rows(3), make_rows(1, seed=1)]),
    "empty_rank_by_hand": ({"by_hand": True, "accumulation": 1}, [make_rows(1), make_rows(1, seed=1)]),
}

# Sharding cuts the matrices that Muon needs whole.
RUNS = [(sharding, name) for sharding in SHARDINGS for name in SCENARIOS if (sharding, name) != ("fsdp2", "muon")]
OPTIMIZERS = {"AdamW": {"lr": 1e-2, "eps": 1e-3}, "Muon": {"lr": 2e-2, "adamw_lr": 1e-2, "adamw_eps": 1e-3}}


def build(
    folder, runtime, sharding="auto", lora=False, by_hand=False, normalization="token", dtype="float32", micro=2,
    accumulation=2, checkpointing=False, packing=False, optimizer="AdamW", parts=False,
):  # fmt: skip
    model = TransformersModel(
        folder, dtype=dtype, seed=4, runtime=runtime, sharding=sharding, gradient_checkpointing=checkpointing
    )
    window = accumulation if by_hand else 1
    if lora:
        model.add_adapter_to_model("default", LoraAdapterConfig(r=4, dropout=0.25), gradient_accumulation_steps=window)
    else:
        model.start_training(window)
    cut = {"packing": True, "micro_batch_tokens": 24} if packing else {"micro_batch_size": micro}
    model.set_processor("InputProcessor", **cut)
    model.set_loss("CrossEntropyLoss", normalization=normalization)
    model.set_optimizer(optimizer, **OPTIMIZERS[optimizer])
    return model


def share(model, rows):
    """Row j of a global batch belongs to rank j % size and keeps j as its sample index."""
    rank, size = model.data_parallel
    return [row | {"sample_index": j} for j, row in enumerate(rows) if j % size == rank]


def train(model, batches, by_hand=False, parts=False):
    metrics = []
    for rows in batches:
        own = share(model, rows)
        if parts:
            model.forward(own)
            model.calculate_loss()
            model.backward()
        else:
            model.forward_backward(own, normalizer=None if by_hand else model.count(own))
        model.clip_grad_and_step()
        metrics.append(model.calculate_metric(is_training=True).result)
    model.finish_window()
    return metrics


def run(folder, runtime, sharding="auto"):
    """name -> (weights, metrics). ``by_hand``: without a normaliser; ``parts``: forward, loss and backward one by one."""
    results = {}
    for name, (options, batches) in SCENARIOS.items():
        if (sharding, name) not in [*RUNS, ("auto", name)]:
            continue
        model = build(folder, runtime, sharding, **options)
        metrics = train(model, batches, options.get("by_hand", False), options.get("parts", False))
        results[name] = (model.get_state_dict(), metrics)
    return results


def open_window(folder, runtime, sharding, out):
    """Two of three calls of a window, saved."""
    model = build(folder, runtime, sharding, by_hand=True, accumulation=3)
    for rows in SCENARIOS["full"][1][:2]:
        model.forward_backward(share(model, rows))
        model.clip_grad_and_step()
    model.save(f"window-{sharding}", out, save_optimizer=True)
    return model


def finish(model):
    model.forward_backward(share(model, SCENARIOS["full"][1][2]))
    model.clip_grad_and_step()
    return model.get_state_dict()


def non_finite(folder, runtime, sharding):
    """Row 1 of the batch (rank 1's) is bad; every rank hears of it and none has moved."""
    model = build(folder, runtime, sharding)
    start = model.get_state_dict()
    rows = make_rows(4)
    rows[1]["input_ids"][0] = 96
    hook = lambda module, args, out: out.masked_fill((args[0] == 96)[..., None], float("nan"))  # noqa: E731
    model.module.get_input_embeddings().register_forward_hook(hook)
    try:
        train(model, [rows])
    except NonFiniteLoss as error:
        unchanged = all(torch.equal(p, start[n]) for n, p in model.get_state_dict().items())
        return {"rows": error.rows, "unchanged": unchanged}
    return {}


def main(runtime: Runtime, folder: str, out: str) -> None:
    for sharding in SHARDINGS:
        for name, (weights, metrics) in run(folder, runtime, sharding).items():
            save_file(weights, Path(out, f"{sharding}-{name}-{runtime.rank}.safetensors"))
            Path(out, f"{sharding}-{name}-{runtime.rank}.json").write_text(json.dumps(metrics))
        window = finish(open_window(folder, runtime, sharding, out))
        save_file(window, Path(out, f"{sharding}-window-{runtime.rank}.safetensors"))
        found = non_finite(folder, runtime, sharding)
        Path(out, f"{sharding}-non_finite-{runtime.rank}.json").write_text(json.dumps(found))
