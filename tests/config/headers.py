"""Model folders of headers and no weights worth the name: validation reads no more."""

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_headers(folder: Path, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))
    return folder


def mixture() -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """A Qwen3-MoE of two layers, the first one dense, the second of 6 experts; as (config.json, tensors)."""
    layers, experts, width, hidden, heads, kv, dim, vocab, dense = 2, 6, 12, 32, 4, 4, 8, 64, 48
    config = {
        "model_type": "qwen3_moe", "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": dense,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv, "head_dim": dim,
        "max_position_embeddings": 2048, "tie_word_embeddings": False, "num_experts": experts, "num_experts_per_tok": 2,
        "moe_intermediate_size": width, "mlp_only_layers": [0],
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden)}
    for layer in range(layers):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        shapes |= {f"{attention}.{name}_proj.weight": (heads * dim, hidden) for name in "qkv"}
        shapes[f"{attention}.o_proj.weight"] = (hidden, heads * dim)
        shapes |= {f"{attention}.{name}_norm.weight": (dim,) for name in "qk"}
        shapes |= {f"model.layers.{layer}.{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
        if layer:
            shapes[f"{mlp}.gate.weight"] = (experts, hidden)
        inner = [(f"{mlp}.experts.{i}", width) for i in range(experts)] if layer else [(mlp, dense)]
        for name, columns in inner:
            shapes |= {f"{name}.{own}_proj.weight": (columns, hidden) for own in ("gate", "up")}
            shapes[f"{name}.down_proj.weight"] = (hidden, columns)
    return config, shapes | {"model.norm.weight": (hidden,)}
