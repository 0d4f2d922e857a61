"""What the tests of test_megatron_families.py compare: what one family has and others have not, in the layouts that could get it
wrong, with transformers and PEFT.

Each process of a launch of N (see ranks.py) does all layouts of N processes, one after the other, and leaves the distances
that it measured.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path

import compute_worker
import lora_worker
from compute_worker import CP2, DEEP, EP2, FULL, PP2, SELECTIVE, SHAPE, SP2, TP2, VPP2, WORK
from hf_folders import save_models

from twinkle_research.distributed.runtime import Runtime

LOCAL = {"rope_type": "default", "rope_theta": 500.0}
GLOBAL = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5}
YARN = {
    "rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 1.5,
    "mscale_all_dim": 0.5,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 12, "q_lora_rank": None, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 6, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "n_shared_experts": 2,
    "rope_parameters": YARN, "initializer_range": 0.05,
}  # fmt: skip
# Windows are shorter than rows; caps are low enough to be felt. Weights are small where these gradients would differ by as much
# as the bounds between any two ways of cutting the same batch.
MODELS = {
    "biased": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "gemma": ("Gemma", {"num_key_value_heads": 1}),
    "gemma2": (
        "Gemma2",
        {
            "sliding_window": 6, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0,
            "attention_bias": True, **DEEP,
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "sliding_window": 6, "query_pre_attn_scalar": 16, "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {"sliding_attention": LOCAL, "full_attention": GLOBAL},
        },
    ),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 6.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4, "logits_scaling": 0.7,
            "mlp_bias": True, **DEEP,
        },
    ),
    "deepseek": ("DeepseekV2", {**LATENT, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5}),
    "latent": ("DeepseekV2", {**LATENT, "first_k_dense_replace": 2, "q_lora_rank": 16}),
    "groups": (
        "DeepseekV2",
        {**LATENT, "rope_parameters": None, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    ),
    "shared": (
        "Qwen2Moe",
        {
            "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24,
            "mlp_only_layers": [1], "initializer_range": 0.05, **DEEP,
        },
    ),
}  # fmt: skip
KINDS = ("cross_entropy", "grpo")


@dataclass(frozen=True)
class Layout:
    model: str
    options: dict = field(default_factory=dict)


LAYOUTS = {
    1: {
        "1-gemma2": Layout("gemma2", FULL), "1-gemma3": Layout("gemma3", SELECTIVE), "1-deepseek": Layout("deepseek", SELECTIVE),
        "1-shared": Layout("shared"),
    },
    2: {
        "tp2-biased": Layout("biased", TP2), "sp2-biased": Layout("biased", SP2 | FULL), "pp2-gemma": Layout("gemma", PP2),
        "tp2-gemma2": Layout("gemma2", TP2), "sp2-gemma2": Layout("gemma2", SP2 | SELECTIVE),
        "vpp2-gemma2": Layout("gemma2", VPP2), "cp2-gemma2": Layout("gemma2", CP2), "sp2-gemma3": Layout("gemma3", SP2 | FULL),
        "cp2-gemma3": Layout("gemma3", CP2), "sp2-deepseek": Layout("deepseek", SP2), "ep2-deepseek": Layout("deepseek", EP2),
        "pp2-deepseek": Layout("deepseek", PP2), "tp2-latent": Layout("latent", TP2),
        "cp2-latent": Layout("latent", CP2 | SELECTIVE), "sp2-groups": Layout("groups", SP2 | FULL),
        "sp2-granite": Layout("granite", SP2), "vpp2-granite": Layout("granite", VPP2 | FULL),
        "sp2-shared": Layout("shared", SP2), "vpp2-shared": Layout("shared", VPP2),
    },
    4: {
        "sp2-pp2-gemma2": Layout("gemma2", SP2 | PP2), "sp2-cp2-gemma3": Layout("gemma3", SP2 | CP2),
        "sp2-pp2-ep2-deepseek": Layout("deepseek", SP2 | PP2 | EP2 | {"expert_tensor_parallel": 1}),
    },
}  # fmt: skip


def save(folders: Path, names: list[str]) -> None:
    """No weight is what another could be taken for: norms and biases have random parts."""
    save_models(folders, {name: MODELS[name] for name in names}, SHAPE, norms=True)


def references(folders: Path, out: Path, size: int) -> None:
    names = sorted({layout.model for layout in LAYOUTS[size].values()})
    save(folders, names)
    for name in names:
        for kind in KINDS:
            compute_worker.reference(folders / name, WORK[kind], out / f"{name}-{kind}")
        if size > 1:
            lora_worker.reference(folders / name, "all", out / f"{name}-lora")


def main(runtime: Runtime, folders: str, expected: str, out: str, names: str = "") -> None:
    for number, (name, layout) in enumerate(LAYOUTS[runtime.world_size].items()):
        if names and name not in names.split(","):
            continue
        folder, stem = Path(folders) / layout.model, Path(expected) / layout.model
        opened = compute_worker.Opened(folder, runtime, layout.options)
        found = {
            kind: compute_worker.measure(opened, WORK[kind], ("padded", "packed")[(i + number) % 2], Path(f"{stem}-{kind}"))
            for i, kind in enumerate(KINDS)
        }
        opened.close()
        Path(out, f"{name}-{runtime.rank}.json").write_text(json.dumps(found))
        if runtime.world_size == 1:  # test_megatron_lora.py has the names and values of each family
            continue
        with_lora = lora_worker.Opened(folder, runtime, layout.options)
        trained = lora_worker.measure(with_lora, "all", lora_worker.Expected(Path(f"{stem}-lora")), packing=bool(number % 2))
        with_lora.close()
        Path(out, f"{name}-{runtime.rank}-lora.json").write_text(json.dumps(trained))
