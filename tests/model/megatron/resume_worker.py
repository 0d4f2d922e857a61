"""What test_resume_matrix.py compares: training that stops in one layout, and goes on in another (see ranks.py)."""

import json
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from equality_cases import LAYOUTS as MESHES
from equality_cases import VOCABULARY
from tiny_models import make_rows

from twinkle_research.distributed.runtime import Runtime
from twinkle_research.model.config import LoraAdapterConfig
from twinkle_research.model.megatron.config import MegatronBackendConfig
from twinkle_research.model.megatron.model import MegatronModel
from twinkle_research.model.saving import SavingMixin
from twinkle_research.model.transformers import TransformersModel

# name -> processes, and the sharding of transformers or the layout of Megatron-Core
LAYOUTS = {
    "transformers": (1, "auto"),
    "DDP2": (2, "ddp"),
    "FSDP2": (2, "fsdp2"),
    "TP2": (2, MESHES[2]["TP2-SP"]),
    "PP2": (2, MESHES[2]["PP2"]),
    "EP2": (2, MESHES[2]["EP2"]),
    "TP2-PP2": (4, MESHES[4]["TP2-PP2"]),
}
BEFORE, AFTER = 3, 5  # optimizer steps
COUNTS = (3, 4, 2, 3, 1, 5, 4, 3)  # rows of each step; where there is one, the second of two shares has none
CLIP = 0.3


@dataclass(frozen=True)
class Kind:
    """``calls``: of forward_backward for an optimizer step. Where there are two, training stops between them."""

    dtype: str = "float32"
    lora: LoraAdapterConfig | None = None
    calls: int = 1


KINDS = {
    "full": Kind(),
    "lora": Kind(lora=LoraAdapterConfig(r=4, alpha=8, dropout=0.1), calls=2),
    "bfloat16": Kind(dtype="bfloat16"),
}
# Each layout reads what it wrote itself, and what the one before it in LAYOUTS did; with all weights in float32, every one's.
NAMES = list(LAYOUTS)
NEXT = list(zip(NAMES, NAMES[1:] + NAMES[:1], strict=True))
PAIRS = {
    "full": list(product(NAMES, NAMES)),
    "lora": [(name, name) for name in NAMES] + NEXT,
    "bfloat16": [(name, name) for name in NAMES] + NEXT,
}


def goes_on(name: str, written: str, read: str) -> bool:
    """In bfloat16 each layout rounds in its own places: only in the same one is what follows the same."""
    return written == read or KINDS[name].dtype == "float32"


def build(folder: Path, kind: Kind, layout: str, runtime: Runtime, packing: bool) -> SavingMixin:
    _, options = LAYOUTS[layout]
    model: SavingMixin
    if isinstance(options, str):
        model = TransformersModel(folder, dtype=kind.dtype, seed=4, runtime=runtime, sharding=options)
    else:
        model = MegatronModel(folder, dtype=kind.dtype, seed=4, runtime=runtime, layout=MegatronBackendConfig(**options))
    if kind.lora is None:
        model.start_training(kind.calls)
    else:
        model.add_adapter_to_model("default", kind.lora, gradient_accumulation_steps=kind.calls)
    model.set_processor("InputProcessor", **({"packing": True, "micro_batch_tokens": 36} if packing else {"micro_batch_size": 2}))
    # As in equality_worker.py: a smaller eps would make much of what rounding left of a gradient.
    model.set_optimizer("AdamW", lr=1e-3, eps=1e-5, weight_decay=0.1)
    model.set_lr_scheduler("cosine", total_steps=10, warmup_steps=2)
    return model


def close(model: SavingMixin) -> None:
    if isinstance(model, MegatronModel):
        model.close()
    else:
        model.training_state().gradients.close()


def train(model: SavingMixin, kind: Kind, first: int, last: int) -> list[dict[str, float]]:
    """The metrics of each call from ``first`` to before ``last``. A row of each third step trains nothing; with several calls a
    step it is left to the optimizer step to divide by the window's normaliser."""
    rank, size = model.data_parallel
    found = []
    for number in range(first, last):
        step = number // kind.calls
        rows = make_rows(COUNTS[step], seed=number, vocabulary=VOCABULARY)
        if step % 3 == 0:
            rows[1]["labels"] = [-100] * rows[1]["length"]
        own = rows[rank::size]
        model.forward_backward(own, normalizer=model.count(own) if kind.calls == 1 else None)
        model.clip_grad_and_step(CLIP)
        found.append(model.calculate_metric(is_training=True).result)
    return found


def stops(kind: Kind) -> tuple[int, int]:
    """Calls until training stops, and until it ends."""
    return BEFORE * kind.calls + kind.calls // 2, (BEFORE + AFTER) * kind.calls


def keep(model: SavingMixin, metrics: list[dict[str, float]], out: Path, name: str) -> None:
    model.save(f"{name}-end", str(out), save_optimizer=True)
    if model.runtime.is_main:
        (out / f"{name}.json").write_text(json.dumps(metrics))


def save(folder: Path, out: Path, name: str, written: str, runtime: Runtime) -> None:
    """Trains without a stop; a checkpoint on the way."""
    kind, (stop, end) = KINDS[name], stops(KINDS[name])
    model = build(folder, kind, written, runtime, packing=False)
    train(model, kind, 0, stop)
    model.save(f"{name}-{written}", str(out), save_optimizer=True)
    keep(model, train(model, kind, stop, end), out, f"{name}-{written}-whole")
    close(model)


def resume(folder: Path, out: Path, name: str, written: str, read: str, runtime: Runtime) -> None:
    """What was read is saved again; then the other steps. In another layout rows are packed instead of padded."""
    kind, (stop, end) = KINDS[name], stops(KINDS[name])
    model = build(folder, kind, read, runtime, packing=written != read)
    model.resume_from_checkpoint(out / f"{name}-{written}")
    model.save(f"{name}-{written}-{read}-again", str(out), save_optimizer=True)
    if goes_on(name, written, read):
        keep(model, train(model, kind, stop, end), out, f"{name}-{written}-{read}")
    close(model)


def main(runtime: Runtime, folder: str, out: str, *parts: str) -> None:
    """``parts``: save, resume. A layout of one process has one of these for each of its runs."""
    for part in parts:
        runs = [(name, layout) for name in KINDS for layout in NAMES] if part == "save" else []
        if part == "resume":
            runs = [(name, *pair) for name, pairs in PAIRS.items() for pair in pairs]
        run = save if part == "save" else resume
        own = {size: [r for r in runs if LAYOUTS[r[-1]][0] == size] for size in (1, runtime.world_size)}
        if runtime.world_size == 2:
            for options in own[1][runtime.rank :: 2]:
                run(Path(folder), Path(out), *options, Runtime())
            runtime.barrier()
        for options in own[runtime.world_size]:
            run(Path(folder), Path(out), *options, runtime)
        runtime.barrier()
