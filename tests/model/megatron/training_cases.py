"""What is trained, in which layouts, and the steps that both backends make of it."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
from peft import LoraConfig
from safetensors.torch import load_file
from tiny_models import make_rows

from twinkle_research.checkpoint.stream import TensorSpec
from twinkle_research.model.saving import SavingMixin

VOCABULARY = 251  # odd: padded where it is cut in two
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "initializer_range": 0.1,
}  # fmt: skip
MODELS = {
    "tied": ("Qwen3", {"tie_word_embeddings": True}),
    "untied": ("Llama", {"tie_word_embeddings": False, "num_hidden_layers": 4}),
    "mixture": ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}),
}  # fmt: skip
LORA = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", bias="none")
ONE_LAYER = LoraConfig(r=4, lora_alpha=8, target_modules=["layers.0.self_attn.q_proj"], bias="none")  # on one pipeline stage
PLAIN = {"lr": 3e-3, "weight_decay": 0.3}


@dataclass(frozen=True)
class Kind:
    """What is trained, and how. Epsilon is large: else a moment near 0 makes much of what rounding left of a gradient."""

    model: str = "tied"
    dtype: str = "float32"
    optimizer: str = "AdamW"
    options: dict = field(default_factory=lambda: PLAIN | {"eps": 1e-3})
    lora: LoraConfig | None = None
    companions: bool = False  # a value head, and a reference


KINDS = {
    "tied": Kind(),
    "untied": Kind("untied"),
    "mixture": Kind("mixture"),
    "bfloat16": Kind("untied", "bfloat16"),
    "adam": Kind(optimizer="Adam"),
    "sgd": Kind(optimizer="SGD", options=PLAIN | {"momentum": 0.9}),
    "plain_sgd": Kind(optimizer="SGD", options=PLAIN),
    "lora": Kind(lora=LORA),
    "one_layer": Kind(lora=ONE_LAYER),
    "companions": Kind(dtype="bfloat16", companions=True),  # parameters of two dtypes
}


@dataclass(frozen=True)
class Layout:
    kinds: tuple[str, ...]
    options: dict = field(default_factory=dict)
    short: bool = False  # updates, and checkpoints of others

    @property
    def overlaps(self) -> bool:
        return "overlap_grad_reduce" in self.options


TP2, PP2, CP2, EP2 = ({f"{name}_parallel": 2} for name in ("tensor", "pipeline", "context", "expert"))
ZERO, OVERLAP = {"distributed_optimizer": True}, {"overlap_grad_reduce": True}
LAYOUTS = {
    1: {"1": Layout(("tied",)), "1-others": Layout(("adam", "sgd", "plain_sgd"), short=True)},
    2: {
        "tp2": Layout(("tied", "lora"), TP2),
        "tp2-whole": Layout(("tied",), TP2 | {"sequence_parallel": False}, short=True),
        "pp2": Layout(("tied", "one_layer", "companions"), PP2),
        "vpp2-overlaps": Layout(("untied",), PP2 | {"virtual_stages": 2} | OVERLAP),
        "cp2": Layout(("tied",), CP2, short=True),
        "dp2": Layout(("tied",)),
        "dp2-zero": Layout(("tied", "companions"), ZERO),
        "dp2-overlaps": Layout(("bfloat16",), ZERO | OVERLAP | {"overlap_param_gather": True}),
        "ep2": Layout(("mixture",), EP2),
    },
    4: {
        "pp2-zero": Layout(("tied",), PP2 | ZERO, short=True),
        "tp2-ep2-zero": Layout(("mixture",), TP2 | EP2 | ZERO | {"expert_tensor_parallel": 1}, short=True),
    },
}


# --- the same on both backends ------------------------------------------------------------------------------------------


def set_up(model: SavingMixin, kind: Kind, accumulation: int) -> SavingMixin:
    if kind.lora is None:
        model.start_training(accumulation)
    else:
        model.add_adapter_to_model("default", kind.lora, gradient_accumulation_steps=accumulation)
    if kind.companions:
        model.add_value_head()
        model.set_reference("refreshed")
        model.set_loss("PPOLoss", value_coef=0.5)
    model.set_processor("InputProcessor", micro_batch_size=3)
    model.set_optimizer(kind.optimizer, **kind.options)
    model.set_lr_scheduler("cosine", total_steps=9, warmup_steps=1)
    return model


def share(model: SavingMixin, rows: list) -> list:
    rank, size = model.data_parallel
    return rows[rank::size]


def call(model: SavingMixin, *seeds: int, adapter_name: str | None = None) -> None:
    rows = share(model, [row for seed in seeds for row in make_rows(5, seed=seed)])
    given = {}
    if model.trained(adapter_name).value_head is not None:
        counts = [sum(label != -100 for label in row["labels"]) for row in rows]
        values = {"advantages": 0.5, "old_logps": -5.0, "old_values": 0.0, "returns": 1.0}
        given = {name: [[value] * count for count in counts] for name, value in values.items()}
    model.forward_backward(rows, adapter_name=adapter_name, **given)


def step(model: SavingMixin, number: int) -> float:
    """A window of two calls, in one where only that is possible; the gradient norm. It is clipped in every second one."""
    seeds, clip = (2 * number, 2 * number + 1), (0.5 if number % 2 else None)
    if model.training_state().gradient_accumulation_steps == 1:
        call(model, *seeds)
        model.clip_grad_and_step(clip)
    else:
        for seed in seeds:
            call(model, seed)
            model.clip_grad_and_step(clip)
    if model.trained().reference is not None:
        model.refresh_reference(0.5)
    return model.calculate_metric(is_training=True).result["grad_norm"]


class Collected:
    """In place of a CheckpointWriter: keeps what would be written."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def add_tensors(self, folder: str, specs: list[TensorSpec], tensors, **options) -> None:
        for spec, (name, tensor) in zip(specs, tensors, strict=True):
            assert TensorSpec.of(name, tensor) == spec
            self.tensors[f"{folder}/{name}"] = tensor.clone()

    def add_json(self, name: str, value: dict) -> None:
        assert json.dumps(value, allow_nan=False)

    def add_files(self, folder: str, write) -> None: ...


def everything(model: SavingMixin, adapter_name: str | None = None) -> dict[str, torch.Tensor]:
    """What a checkpoint would hold, by folder and name in it. Collective."""
    collected = Collected()
    model.save_state(collected, adapter_name=adapter_name)
    return collected.tensors


def stored(where: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in sorted(where.rglob("*.safetensors")):
        found |= {f"{file.parent.name}/{name}": tensor for name, tensor in load_file(file).items()}
    return found


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


def reference(model: SavingMixin, name: str, out: Path) -> None:
    """Three updates, a checkpoint; a call, a checkpoint inside the window; the end of that window, a checkpoint."""
    norms = [step(model, number) for number in range(3)]
    model.save(f"{name}-closed", str(out), save_optimizer=True)
    call(model, 6)
    model.clip_grad_and_step(None)
    model.save(f"{name}-open", str(out), save_optimizer=True)
    call(model, 7)
    model.clip_grad_and_step(None)
    model.save(f"{name}-end", str(out), save_optimizer=True)
    (out / f"{name}.json").write_text(json.dumps(norms))
