"""What test_megatron_equality.py compares: models, layouts, tasks, and the rows of twenty optimizer steps."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_folders import save_models
from tiny_models import make_rows

VOCABULARY = 251  # odd: padded where it is cut in two
PAD = 7  # an id that rows contain
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "initializer_range": 0.05, "pad_token_id": PAD,
}  # fmt: skip
FAMILIES = {
    "qwen3": ("Qwen3", {}),
    "llama": ("Llama", {}),
    "mixture": (
        "Qwen3Moe",
        {
            "head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
}  # fmt: skip
TP2, PP2, CP2, EP2 = ({f"{name}_parallel": 2} for name in ("tensor", "pipeline", "context", "expert"))
VPP2 = PP2 | {"virtual_stages": 2}
ZERO, OVERLAP = {"distributed_optimizer": True}, {"overlap_grad_reduce": True}
OVERLAPS = ZERO | OVERLAP | {"overlap_param_gather": True}
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "TP2": TP2 | {"sequence_parallel": False}, "TP2-SP": TP2, "PP2": PP2, "VPP2": VPP2, "CP2": CP2, "DP2": {},
        "DP2-zero": ZERO, "DP2-overlap": OVERLAP, "DP2-overlaps": OVERLAPS, "EP2": EP2, "ETP2": {"expert_tensor_parallel": 2},
        "TP2-ETP1": TP2 | {"expert_tensor_parallel": 1},
    },
    4: {
        "TP2-PP2": TP2 | PP2, "TP2-VPP2": TP2 | VPP2, "TP2-CP2": TP2 | CP2, "TP2-DP2-zero": TP2 | ZERO, "PP2-CP2": PP2 | CP2,
        "PP2-DP2-overlaps": PP2 | OVERLAPS, "TP2-PP2-EP2": TP2 | PP2 | EP2 | {"expert_tensor_parallel": 1},
        "TP2-EP2-zero": TP2 | EP2 | ZERO, "CP2-EP2": CP2 | EP2,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Task:
    """``reads``: the loss inputs that are recorded. ``reference``: log-probabilities of a reference model are another."""

    loss: str
    options: dict[str, Any] = field(default_factory=dict)
    reads: tuple[str, ...] = ()
    reference: bool = False
    together: int = 1
    tempered: bool = False
    critic: bool = False


TASKS = {
    "sft": Task("CrossEntropyLoss"),
    "grpo": Task(
        "GRPOLoss", {"beta": 0.05, "entropy_coef": 0.02}, ("advantages", "old_logps"), reference=True, tempered=True,
    ),
    "dpo": Task("DPOLoss", {"beta": 0.5}, reference=True, together=2),
    "ppo": Task("PPOLoss", {"value_coef": 0.5}, ("advantages", "old_logps", "old_values", "returns"), critic=True),
}  # fmt: skip
ADAPTERS = {"full": None, "lora": 0.0, "dropout": 0.1}  # the dropout of a LoRA
PACKING = ("padded", "packed")
RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True)
class Case:
    layout: str
    family: str
    tied: bool
    task: str
    adapter: str
    packing: str
    recompute: str

    def __str__(self) -> str:
        return "/".join((self.layout, self.model, self.task, self.adapter, self.packing, self.recompute))

    @property
    def model(self) -> str:
        """``deep``: four layers, one for each virtual stage. Two are enough elsewhere, and take half the time."""
        return f"{self.family}-{'tied' if self.tied else 'untied'}{'-deep' if 'VPP' in self.layout else ''}"

    @property
    def reference(self) -> str:
        """What is compared with: it depends on nothing that only a layout has."""
        return f"{self.model}-{self.task}-{self.adapter}"


def is_possible(layout: str, family: str, tied: bool, task: str, adapter: str, *_: str) -> bool:
    """Experts in a mixture only, which Megatron-Core does not train without sequence parallelism. Weights that come late must
    all be trained; and where gradients are summed in the only call of a window, dropout has the key of that one call."""
    if ("EP2" in layout or "ETP" in layout) and family != "mixture":
        return False
    if layout == "TP2" and family == "mixture":
        return False
    return not ("overlaps" in layout and adapter != "full") and not ("overlap" in layout and adapter == "dropout")


# --- rows -------------------------------------------------------------------------------------------------------------

Call = list[dict[str, Any]]  # rows of one forward_backward
EPOCHS = 10  # of two optimizer steps each


def epochs(task: Task, seed: int = 0) -> list[list[Call]]:
    """Each epoch has three calls: a window of two, and a last one that is only half a window. That has a single row (or pair)
    in each second epoch, so that one of two shares has none. In each third epoch a row trains nothing."""
    found = []
    for epoch in range(EPOCHS):
        rng = random.Random(1000 * seed + epoch)
        counts = (rng.randint(2, 4), rng.randint(1, 2), 1 if epoch % 2 else rng.randint(2, 3))
        calls = [make_rows(n * task.together, seed=rng.randrange(10**6), vocabulary=VOCABULARY) for n in counts]
        if epoch % 3 == 0 and task.together == 1:
            calls[0][1]["labels"] = [-100] * calls[0][1]["length"]
        if task.tempered:
            for i, row in enumerate(row for call in calls for row in call):
                row["temperature"] = 0.8 + 0.1 * (i % 5)
        found.append(calls)
    return found


def make_folder(model: str, folder: Path) -> None:
    """``model``: that of a case."""
    name, tying, *deep = model.split("-")
    family, options = FAMILIES[name]
    options = options | {"tie_word_embeddings": tying == "tied"} | ({"num_hidden_layers": 4} if deep else {})
    save_models(folder.parent, {folder.name: (family, options)}, SHAPE, norms=True)
