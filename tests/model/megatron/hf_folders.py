"""Tiny Hugging Face folders of every family and variant that backend=megatron maps, with every bit of every weight random.

Random bits are also NaNs with payloads, infinities, denormals and negative zeros: what is only copied keeps them.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from twinkle_research.checkpoint.stream import TensorFolder

BASE = {
    "vocab_size": 250, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 12, "q_lora_rank": None, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 6, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "tie_word_embeddings": False,
}  # fmt: skip
SHARED = {"shared_expert_intermediate_size": 24, "mlp_only_layers": [1], "tie_word_embeddings": False}
# name -> (family, config, dtype)
MODELS = {
    "deepseek": ("DeepseekV2", LATENT, torch.float32),
    "deepseek_queries": ("DeepseekV2", {**LATENT, "q_lora_rank": 16, "first_k_dense_replace": 0}, torch.bfloat16),
    "gemma": ("Gemma", {"tie_word_embeddings": True, "head_dim": 16, "num_key_value_heads": 1}, torch.float32),
    "gemma2": ("Gemma2", {"tie_word_embeddings": False, "head_dim": 8, "sliding_window": 8}, torch.bfloat16),
    "gemma3": ("Gemma3", {"tie_word_embeddings": False, "head_dim": 24, "sliding_window": 8, "vocab_size": 251}, torch.float32),
    "granite": ("Granite", {"tie_word_embeddings": True, "attention_bias": True, "vocab_size": 249}, torch.bfloat16),
    "llama_biased": (
        "Llama", {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True, "vocab_size": 253}, torch.float32,
    ),
    "llama_tied": ("Llama", {"tie_word_embeddings": True, "vocab_size": 251, "num_key_value_heads": 1}, torch.float32),
    "llama_untied": ("Llama", {"tie_word_embeddings": False, "num_key_value_heads": 4, "head_dim": 24}, torch.bfloat16),
    "mistral": ("Mistral", {"tie_word_embeddings": False, "head_dim": 16, "sliding_window": 8}, torch.float32),
    "qwen2_tied": ("Qwen2", {"tie_word_embeddings": True, "vocab_size": 253}, torch.bfloat16),
    "qwen2_untied": ("Qwen2", {"tie_word_embeddings": False, "num_key_value_heads": 1}, torch.float32),
    "qwen2_moe": ("Qwen2Moe", {**MIXTURE, **SHARED}, torch.float32),
    "qwen3_tied": ("Qwen3", {"tie_word_embeddings": True, "head_dim": 24}, torch.float32),
    "qwen3_untied": ("Qwen3", {"tie_word_embeddings": False, "head_dim": 8, "vocab_size": 249}, torch.float32),
    "qwen3_moe_tied": ("Qwen3Moe", {"tie_word_embeddings": True, "head_dim": 8, **MIXTURE}, torch.float32),
    "qwen3_moe_mixed": (
        "Qwen3Moe", {"tie_word_embeddings": False, "head_dim": 16, "mlp_only_layers": [1, 2], **MIXTURE}, torch.bfloat16,
    ),
    "mixtral": ("Mixtral", {"tie_word_embeddings": False, "num_local_experts": 4, "vocab_size": 251}, torch.float32),
}  # fmt: skip
INTEGERS = {4: torch.int32, 2: torch.int16}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: NaN equals NaN, 0 does not equal -0."""
    return tensor.contiguous().view(INTEGERS[tensor.dtype.itemsize])


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    kind = torch.iinfo(INTEGERS[dtype.itemsize])
    numbers = torch.randint(kind.min, kind.max + 1, tuple(shape), generator=torch.Generator().manual_seed(seed))
    return numbers.to(INTEGERS[dtype.itemsize]).view(dtype)


def of_family(family: str, options: dict):
    """A model of transformers with its initial values."""
    import transformers

    config = getattr(transformers, f"{family}TextConfig" if family == "Gemma3" else f"{family}Config")
    return getattr(transformers, f"{family}ForCausalLM")(config(**options))


def save_models(out: Path, models: dict[str, tuple[str, dict]], shape: dict, norms: bool = False) -> None:
    """A folder for each of ``models`` (name -> family and what differs from ``shape``), with its initial values. ``norms``: these
    are not all 1, so that each of them matters."""
    for name, (family, options) in models.items():
        torch.manual_seed(0)
        model = of_family(family, shape | options)
        with torch.no_grad():
            for parameter in model.parameters() if norms else ():
                if parameter.ndim == 1:
                    parameter.add_(0.1 * torch.randn_like(parameter))
        model.save_pretrained(out / name)


def make_folder(name: str, folder: Path) -> None:
    family, options, dtype = MODELS[name]
    model = of_family(family, BASE | options).to(dtype)
    model.save_pretrained(folder, max_shard_size="80KB")
    for i, file in enumerate(TensorFolder(folder, "model").files):
        tensors = load_file(folder / file)
        changed = {n: random_bits(t.shape, dtype, 1000 * i + j) for j, (n, t) in enumerate(sorted(tensors.items()))}
        save_file(changed, folder / file, metadata={"format": "pt"})


def make_folders(out: Path) -> None:
    for name in MODELS:
        make_folder(name, out / name)
