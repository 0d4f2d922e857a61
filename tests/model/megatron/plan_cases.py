"""Layouts of two processes (and one) whose memory and traffic the plan foretells."""

import random
from dataclasses import dataclass, field
from typing import Any

LENGTH, ROWS = 24, 4
SHAPE = {
    "vocab_size": 256, "hidden_size": 48, "intermediate_size": 112, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "pad_token_id": None,
}  # fmt: skip
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 24, "q_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
    "v_head_dim": 10, "head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40,
    "n_shared_experts": 2, "first_k_dense_replace": 1,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("Qwen3", {"tie_word_embeddings": True}),
    "untied": ("Llama", {"tie_word_embeddings": False}),
    "biased": ("Qwen2", {"tie_word_embeddings": False, "hidden_size": 64}),
    "mixture": ("Qwen3Moe", {"tie_word_embeddings": False, **MIXTURE}),
    "one-head": ("Gemma", {"num_key_value_heads": 1, "vocab_size": 254}),
    "granite": ("Granite", {"attention_bias": True, "mlp_bias": True, "residual_multiplier": 0.5}),
    # The first layer is dense, and with it the stages differ.
    "latent": ("DeepseekV2", {"tie_word_embeddings": False, **LATENT}),
    "shared": ("Qwen2Moe", {"tie_word_embeddings": False, "shared_expert_intermediate_size": 56, **MIXTURE}),
}


@dataclass(frozen=True)
class Case:
    model: str = "tied"
    processes: int = 2
    options: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    lora: int = 0  # rank
    megatron: bool = True
    micro: int = 1  # rows


CASES = {
    "alone": Case(processes=1),
    "alone-biased": Case("biased", processes=1, dtype="bfloat16"),
    "tp": Case(options={"tensor_parallel": 2, "sequence_parallel": False}),
    "sp": Case(options={"tensor_parallel": 2}),
    "sp-bf16": Case("untied", options={"tensor_parallel": 2}, dtype="bfloat16"),
    "sp-recompute": Case("untied", options={"tensor_parallel": 2, "recompute": "full"}),
    "sp-lora": Case("untied", options={"tensor_parallel": 2}, lora=3),
    "tp-lora": Case("untied", options={"tensor_parallel": 2, "sequence_parallel": False}, lora=3),
    "pp": Case(options={"pipeline_parallel": 2}),
    "pp-untied": Case("untied", options={"pipeline_parallel": 2}, dtype="bfloat16"),
    "vpp": Case("untied", options={"pipeline_parallel": 2, "virtual_stages": 2}),
    "dp": Case(dtype="bfloat16"),
    "do": Case(options={"distributed_optimizer": True}),
    "do-bf16": Case("untied", options={"distributed_optimizer": True}, dtype="bfloat16"),
    "cp": Case(options={"context_parallel": 2}),
    "ep": Case("mixture", options={"expert_parallel": 2}),
    "etp": Case("mixture", options={"tensor_parallel": 2}),
    "sp-granite": Case("granite", options={"tensor_parallel": 2}, dtype="bfloat16"),
    "pp-one-head": Case("one-head", options={"pipeline_parallel": 2}),
    "sp-latent": Case("latent", options={"tensor_parallel": 2}),
    "tp-latent-lora": Case("latent", options={"tensor_parallel": 2, "expert_tensor_parallel": 1}, lora=3),
    "pp-latent": Case("latent", options={"pipeline_parallel": 2}),
    "pp-latent-lora": Case("latent", options={"pipeline_parallel": 2}, lora=3),
    "cp-latent": Case("latent", options={"context_parallel": 2}),
    "ep-latent": Case("latent", options={"expert_parallel": 2}),
    "sp-shared": Case("shared", options={"tensor_parallel": 2}),
    "sp-shared-lora": Case("shared", options={"tensor_parallel": 2}, lora=3),
    "ddp": Case("untied", megatron=False, options={"sharding": "ddp"}),
    "ddp-bf16": Case("tied", megatron=False, options={"sharding": "ddp"}, dtype="bfloat16"),
    "ddp-lora": Case("tied", megatron=False, options={"sharding": "ddp"}, lora=3),
    "fsdp2": Case("untied", megatron=False, options={"sharding": "fsdp2"}),
    "fsdp2-bf16": Case("untied", megatron=False, options={"sharding": "fsdp2"}, dtype="bfloat16"),
    "fsdp2-lora": Case("untied", megatron=False, options={"sharding": "fsdp2"}, lora=3),
}


def features(case: Case) -> list[dict[str, list[int]]]:
    """Rows of one length, every token trained."""
    draw = random.Random(0)
    rows = [[draw.randrange(1, SHAPE["vocab_size"]) for _ in range(LENGTH)] for _ in range(ROWS)]
    return [{"input_ids": row, "labels": [*row[1:], row[0]]} for row in rows]


def words(case: Case) -> list[str]:
    """The same for the command line."""
    backend = "megatron" if case.megatron else "transformers"
    found = [f"backend={backend}", f"model.dtype={case.dtype}", f"trainer.batch_size={ROWS}", f"data.max_length={LENGTH}"]
    found += [f"trainer.micro_batch_size={case.micro}", f"launch.nproc_per_node={case.processes}", "data.sample_prompts=[]"]
    found += ["adapter=lora", f"adapter.r={case.lora}"] if case.lora else ["adapter=none"]
    return found + [f"backend.{key}={str(value).lower()}" for key, value in case.options.items()]
