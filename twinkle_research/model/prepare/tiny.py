"""model=tiny: a small Qwen3 with seeded random weights and its own tokenizer.

It trains in seconds on a CPU, so that tests and demonstrations use a real architecture end to end.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

from twinkle_research.model.config import ArchitectureConfig, DType
from twinkle_research.model.facts import tensor_shapes
from twinkle_research.model.prepare.tokenizer import END_ID, PAD_ID, VOCAB_SIZE, write_tiny_tokenizer
from twinkle_research.randomness import derive_seed

if TYPE_CHECKING:
    from torch import Tensor

ARCHITECTURE = ArchitectureConfig(
    model_type="qwen3", vocab_size=VOCAB_SIZE, hidden_size=128, intermediate_size=384, num_layers=4, num_heads=4,
    num_kv_heads=2, head_dim=32, max_positions=1024, tied_embeddings=True, qk_norm=True,
)  # fmt: skip
SEED = 0
INITIALIZER_RANGE = 0.02


def initial_values(name: str, shape: tuple[int, ...], seed: int = SEED):
    """float32 values of a new parameter, keyed by (seed, Hugging Face name) and the same bits on every machine.

    Norm weights are 1. Others are a sum of four uniform 16-bit integers, scaled to the standard deviation
    INITIALIZER_RANGE: nearly normal, and exact integer arithmetic but for one multiplication, where the log and
    cos of a normal generator would round differently on different processors.
    """
    import numpy as np

    if name.endswith("norm.weight"):
        return np.ones(shape, dtype=np.float32)
    count = math.prod(shape)
    bits = np.random.Philox(key=derive_seed(seed, "init", name)).random_raw(count).astype("<u8", copy=False)
    total = bits.view("<u2").reshape(count, 4).astype(np.int32).sum(axis=1)
    scale = INITIALIZER_RANGE / math.sqrt(4 * (2**32 - 1) / 12)
    return ((total - 2 * 65535).astype(np.float32) * np.float32(scale)).reshape(shape)


def model_config(dtype: DType) -> dict:
    """The content of config.json."""
    a = ARCHITECTURE
    return {
        "architectures": ["Qwen3ForCausalLM"], "model_type": a.model_type, "vocab_size": a.vocab_size,
        "hidden_size": a.hidden_size, "intermediate_size": a.intermediate_size, "num_hidden_layers": a.num_layers,
        "num_attention_heads": a.num_heads, "num_key_value_heads": a.num_kv_heads, "head_dim": a.head_dim,
        "max_position_embeddings": a.max_positions, "max_window_layers": a.num_layers, "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "rope_scaling": None, "attention_bias": False, "attention_dropout": 0.0,
        "use_sliding_window": False, "sliding_window": None, "tie_word_embeddings": a.tied_embeddings,
        "initializer_range": INITIALIZER_RANGE, "bos_token_id": None, "eos_token_id": END_ID, "pad_token_id": PAD_ID,
        "torch_dtype": dtype.value, "use_cache": True,
    }  # fmt: skip


def write(folder: Path, dtype: DType) -> None:
    """Writes the model as a Hugging Face folder."""
    import torch

    tensors = {
        name: torch.from_numpy(initial_values(name, shape)).to(getattr(torch, dtype.value))
        for name, shape in tensor_shapes(ARCHITECTURE).items()
    }
    write_folder(folder, tensors, dtype)


def write_folder(folder: Path, tensors: dict[str, Tensor], dtype: DType) -> None:
    """Weights of this architecture, in ``dtype``, with the config and tokenizer that belong to them."""
    from safetensors.torch import save_file

    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(model_config(dtype), indent=1), encoding="utf-8")
    generation = {"eos_token_id": END_ID, "pad_token_id": PAD_ID}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1), encoding="utf-8")
    write_tiny_tokenizer(folder, ARCHITECTURE.max_positions)
