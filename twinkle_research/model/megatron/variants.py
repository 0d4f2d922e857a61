"""What a Hugging Face config asks for beyond its sizes, or a refusal that names what Megatron-Core cannot compute exactly."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from twinkle_research.errors import ConfigError, nearest
from twinkle_research.model.head import LogitTransform

if TYPE_CHECKING:
    from transformers import PretrainedConfig

GEMMA = ("gemma", "gemma2", "gemma3_text")
# Families whose ``attention_bias`` means q, k, v and o alike.
_BIASED = ("granite", "llama", "qwen3", "qwen3_moe", *GEMMA)
# Rotary embeddings that are a fixed vector of frequencies, whatever the length of the sequence.
ROTARY = ("default", "linear", "llama3", "yarn")
_SILU, _GELU = ("silu", "swish"), ("gelu_pytorch_tanh",)


@dataclass(frozen=True)
class Experts:
    count: int
    per_token: int
    intermediate_size: int
    normalized: bool  # whether the weights of a token's experts sum to 1
    layers: tuple[bool, ...]  # which layers are mixtures
    scale: float = 1.0  # of the weights
    groups: tuple[int, int] | None = None  # equal groups of experts, how many of them a token chooses
    exact_router: bool = False  # computed in float32 whatever the model's dtype
    shared_size: int = 0  # of an expert that every token sees
    gated_share: bool = False  # whether what it gives is weighed for each token


@dataclass(frozen=True)
class Latent:
    """Widths of latent attention. ``query_rank`` None: queries are not compressed."""

    query_rank: int | None
    rank: int
    content: int
    rotated: int
    value: int
    norm_eps: float = 1e-6


@dataclass(frozen=True)
class Rotary:
    """``frequencies``: [kinds, head_dim / 2], ``kinds``: which of them each layer has. ``scale`` multiplies cosines and sines."""

    frequencies: Tensor
    kinds: tuple[int, ...]
    scale: float


def refuse_variants(config: PretrainedConfig) -> None:
    family = config.model_type
    gated = _GELU if family in GEMMA else _SILU
    activation = activation_of(config)
    if activation not in gated:
        raise ConfigError(
            f"model type {family} with an MLP of {activation!r} is not supported by backend=megatron, only with {gated[0]}"
        )
    keys = ["pretraining_tp", "use_bidirectional_attention"]
    keys += [] if family in _BIASED else ["attention_bias"]
    keys += [] if family in ("granite", "llama") else ["mlp_bias"]
    keys += ["attn_logit_softcapping"] if family == "gemma3_text" else []  # which transformers does not apply
    if family == "deepseek_v2":
        keys += ["norm_topk_prob"]  # which transformers does not apply either, but others do
        if config.topk_method not in ("greedy", "group_limited_greedy"):
            keys += ["topk_method"]
    for key in keys:
        value = getattr(config, key, None)
        if value and (key, value) != ("pretraining_tp", 1):
            raise ConfigError(f"model type {family} with {key}={value} is not supported by backend=megatron")
    if getattr(config, "quantization_config", None):
        raise ConfigError(f"model type {family}: quantised weights cannot be trained")


def activation_of(config: PretrainedConfig) -> str:
    return getattr(config, "hidden_activation", None) or config.hidden_act


def has_bias(config: PretrainedConfig, key: str) -> bool:
    return bool(getattr(config, key, False))


def read_rotary(config: PretrainedConfig) -> Rotary:
    """transformers' own frequencies, so that every kind of scaling is exactly its."""
    kinds = getattr(config, "layer_types", None) or []
    names = [kind for kind in sorted(set(kinds)) if kind in config.rope_parameters]
    if not names:
        frequencies, scale = _frequencies(config, config.rope_parameters, {})
        return Rotary(frequencies[None], (0,) * config.num_hidden_layers, scale)
    found = [_frequencies(config, config.rope_parameters[name], {"layer_type": name}) for name in names]
    if len({scale for _, scale in found}) > 1:
        raise ConfigError(
            f"model type {config.model_type}: rotary embeddings whose scale differs between layers are not supported"
        )
    return Rotary(torch.stack([frequencies for frequencies, _ in found]), tuple(map(names.index, kinds)), found[0][1])


def _frequencies(config: PretrainedConfig, parameters: dict[str, Any], which: dict[str, str]) -> tuple[Tensor, float]:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind = parameters.get("rope_type", "default")
    if kind not in ROTARY:
        raise ConfigError(f"rotary embeddings of kind {kind!r} are not supported by backend=megatron; {nearest(kind, ROTARY)}")
    if kind == "default":
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        width = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
        steps = torch.arange(0, width, 2, dtype=torch.int64).float() / width
        return 1.0 / (parameters["rope_theta"] ** steps), 1.0
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), **which)
    return frequencies.float(), float(scale)


def read_windows(config: PretrainedConfig) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    if not getattr(config, "use_sliding_window", True):
        window = None
    kinds = getattr(config, "layer_types", None)
    if window is None:
        return (None,) * config.num_hidden_layers
    if kinds is None:
        return (window,) * config.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def read_experts(config: PretrainedConfig) -> Experts | None:
    family, numbers = config.model_type, range(config.num_hidden_layers)
    if family == "mixtral":
        return Experts(
            config.num_local_experts, config.num_experts_per_tok, config.intermediate_size, True, (True,) * len(numbers)
        )
    if family == "deepseek_v2":
        limited = config.topk_method == "group_limited_greedy"
        return Experts(
            config.n_routed_experts, config.num_experts_per_tok, config.moe_intermediate_size, False,
            tuple(i >= config.first_k_dense_replace for i in numbers), scale=config.routed_scaling_factor,
            groups=(config.n_group, config.topk_group) if limited else None, exact_router=True,
            shared_size=config.moe_intermediate_size * config.n_shared_experts,
        )  # fmt: skip
    if family not in ("qwen2_moe", "qwen3_moe"):
        return None
    step, dense = config.decoder_sparse_step, set(config.mlp_only_layers or ())
    shared = config.shared_expert_intermediate_size if family == "qwen2_moe" else 0
    return Experts(
        config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size, bool(config.norm_topk_prob),
        tuple(i not in dense and (i + 1) % step == 0 for i in numbers), shared_size=shared, gated_share=bool(shared),
    )  # fmt: skip


def read_latent(config: PretrainedConfig) -> Latent | None:
    if config.model_type != "deepseek_v2":
        return None
    return Latent(config.q_lora_rank, config.kv_lora_rank, config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim)


def read_logits(config: PretrainedConfig) -> LogitTransform:
    """What is done to what the vocabulary projection gives."""
    divisor = config.logits_scaling if config.model_type == "granite" else 1.0
    return LogitTransform(1.0 / divisor, getattr(config, "final_logit_softcapping", None))


def softmax_scale(config: PretrainedConfig, head_dim: int) -> float:
    """Of products of queries and keys."""
    parameters = config.rope_parameters
    if config.model_type == "deepseek_v2" and parameters.get("rope_type", "default") != "default":
        # Longer contexts than it was trained with sharpen the attention (YaRN, arXiv:2309.00071, eq. 22).
        factor, weight = parameters["factor"], parameters.get("mscale_all_dim") or 0
        mscale = 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
        return head_dim**-0.5 * mscale * mscale
    if config.model_type == "granite":
        return config.attention_multiplier
    return (getattr(config, "query_pre_attn_scalar", None) or head_dim) ** -0.5
