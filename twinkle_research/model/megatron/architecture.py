"""From a Hugging Face config to Megatron-Core's TransformerConfig, or a refusal that names what has no exact counterpart."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from twinkle_research.errors import ConfigError, nearest
from twinkle_research.model.megatron.config import MODEL_TYPES, MegatronBackendConfig, Recompute

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from twinkle_research.model.megatron.mesh import Mesh

# Rotary embeddings that are a fixed vector of frequencies, whatever the length of the sequence.
ROTARY = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class Experts:
    count: int
    per_token: int
    intermediate_size: int
    normalized: bool  # whether the weights of a token's experts sum to 1
    layers: tuple[bool, ...]  # which layers are mixtures


@dataclass(frozen=True)
class Architecture:
    """What is needed to build the model and to find its tensors. ``windows``: per layer the tokens that a token sees, None:
    all before it. ``rotary``: [head_dim / 2] frequencies; ``rotary_scale`` multiplies cosines and sines."""

    config: PretrainedConfig
    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tied: bool
    qk_norm: bool
    qkv_bias: bool
    windows: tuple[int | None, ...]
    rotary: Tensor
    rotary_scale: float
    experts: Experts | None

    @classmethod
    def read(cls, folder: str | Path, trust_remote_code: bool = False, revision: str | None = None) -> Architecture:
        """Raises ConfigError where ``folder`` is no model, or one that Megatron-Core cannot compute exactly."""
        from transformers import AutoConfig

        try:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, revision=revision)
        except (OSError, ValueError) as error:
            raise ConfigError(f"model.path={folder}: {error}") from error
        family = config.model_type
        if family not in MODEL_TYPES:
            raise ConfigError(
                f"backend=megatron has no exact mapping for model type {family!r}, only for {', '.join(MODEL_TYPES)} "
                f"({nearest(family, MODEL_TYPES)}); write backend=transformers"
            )
        _refuse_variants(config)
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        rotary, scale = _rotary(config)
        if len(rotary) * 2 != head_dim:
            raise ConfigError(f"model type {family} rotates a part of each head only, which backend=megatron does not know")
        return cls(
            config=config, family=family, num_layers=config.num_hidden_layers, hidden_size=config.hidden_size, num_heads=heads,
            num_kv_heads=config.num_key_value_heads or heads, head_dim=head_dim, intermediate_size=config.intermediate_size,
            vocab_size=config.vocab_size, tied=bool(config.tie_word_embeddings), qk_norm=family in ("qwen3", "qwen3_moe"),
            qkv_bias=family == "qwen2", windows=_windows(config), rotary=rotary, rotary_scale=scale, experts=_experts(config),
        )  # fmt: skip

    def padded_vocab(self, tensor_parallel: int) -> int:
        return -(-self.vocab_size // tensor_parallel) * tensor_parallel

    def transformer_config(self, mesh: Mesh, dtype: torch.dtype, *, on_gpu: bool, fused: bool) -> TransformerConfig:
        """``fused``: kernels of Transformer Engine are used. Fusions are the device's, everything else is the same on both."""
        layout = mesh.layout
        experts = self.experts
        mixture: dict[str, Any] = {}
        if experts is not None:
            mixture = {
                "num_moe_experts": experts.count, "moe_router_topk": experts.per_token,
                "moe_ffn_hidden_size": experts.intermediate_size, "moe_layer_freq": [int(mixes) for mixes in experts.layers],
                "moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0, "moe_grouped_gemm": False,
                # The weights of a token's experts: softmax over them alone, or a part of that over all.
                "moe_router_pre_softmax": not experts.normalized, "moe_permute_fusion": False,
            }  # fmt: skip
        config = TransformerConfig(
            num_layers=self.num_layers, hidden_size=self.hidden_size, num_attention_heads=self.num_heads,
            num_query_groups=self.num_kv_heads, kv_channels=self.head_dim, ffn_hidden_size=self.intermediate_size,
            normalization="RMSNorm", layernorm_epsilon=self.config.rms_norm_eps, gated_linear_unit=True, activation_func=F.silu,
            add_bias_linear=False, add_qkv_bias=self.qkv_bias, qk_layernorm=self.qk_norm, hidden_dropout=0.0,
            attention_dropout=0.0, params_dtype=dtype, pipeline_dtype=dtype, autocast_dtype=dtype, bf16=dtype is torch.bfloat16,
            tensor_model_parallel_size=mesh.tp.size, pipeline_model_parallel_size=mesh.pp.size,
            virtual_pipeline_model_parallel_size=layout.virtual_stages if layout.virtual_stages > 1 else None,
            context_parallel_size=mesh.cp.size, expert_model_parallel_size=mesh.ep.size,
            expert_tensor_parallel_size=mesh.etp.size, sequence_parallel=mesh.sequence_parallel,
            # Weights are loaded. With perform_initialization off they would lack the marks that the gradient norm goes by.
            perform_initialization=True, init_method=_leave, output_layer_init_method=_leave, embedding_init_method=_leave,
            # Micro-batches differ in length, but where two interleaved stages are each other's next and previous one: mcore
            # would take one's activations for its gradients.
            variable_seq_lengths=mesh.pp.size > 1 and not (layout.virtual_stages > 1 and mesh.pp.size == 2),
            moe_token_dispatcher_type="alltoall",
            batch_p2p_comm=on_gpu and layout.virtual_stages == 1, deallocate_pipeline_outputs=True, calculate_per_token_loss=True,
            bias_activation_fusion=on_gpu, bias_dropout_fusion=on_gpu, masked_softmax_fusion=False, apply_rope_fusion=False,
            gradient_accumulation_fusion=False, persist_layer_norm=fused, attention_softmax_in_fp32=False,
            **_recompute(layout), **mixture,
        )  # fmt: skip
        if self.rotary_scale != 1.0:
            # By these mcore reckons what it multiplies cosines and sines by: 1 + 0.1 * yarn_mscale * log(factor), here so that
            # it comes to rotary_scale.
            config.yarn_rotary_scaling_factor = math.e
            config.yarn_mscale, config.yarn_mscale_all_dim = 10 * (self.rotary_scale - 1), 0.0
        return config


def _leave(weight: Tensor) -> Tensor:
    return weight


def _recompute(layout: MegatronBackendConfig) -> dict[str, Any]:
    if layout.recompute is Recompute.full:
        return {
            "recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": layout.recompute_layers,
        }  # fmt: skip
    if layout.recompute is Recompute.selective:
        return {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    return {}


def _refuse_variants(config: PretrainedConfig) -> None:
    family = config.model_type
    if config.hidden_act not in ("silu", "swish"):
        raise ConfigError(f"model type {family} with hidden_act={config.hidden_act!r} is not supported by backend=megatron")
    for key in ("attention_bias", "mlp_bias", "pretraining_tp"):
        value = getattr(config, key, None)
        if value not in (None, False, 1):
            raise ConfigError(f"model type {family} with {key}={value} is not supported by backend=megatron")
    if getattr(config, "quantization_config", None):
        raise ConfigError(f"model type {family}: quantised weights cannot be trained")


def _rotary(config: PretrainedConfig) -> tuple[Tensor, float]:
    """transformers' own frequencies, so that every kind of scaling is exactly its."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = config.rope_parameters
    kind = parameters.get("rope_type", "default")
    if kind not in ROTARY:
        raise ConfigError(f"rotary embeddings of kind {kind!r} are not supported by backend=megatron; {nearest(kind, ROTARY)}")
    if kind == "default":
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        width = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
        steps = torch.arange(0, width, 2, dtype=torch.int64).float() / width
        return 1.0 / (parameters["rope_theta"] ** steps), 1.0
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return frequencies.float(), float(scale)


def _windows(config: PretrainedConfig) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    if not getattr(config, "use_sliding_window", True):
        window = None
    kinds = getattr(config, "layer_types", None)
    if window is None:
        return (None,) * config.num_hidden_layers
    if kinds is None:
        return (window,) * config.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _experts(config: PretrainedConfig) -> Experts | None:
    if config.model_type == "mixtral":
        layers = (True,) * config.num_hidden_layers
        return Experts(config.num_local_experts, config.num_experts_per_tok, config.intermediate_size, True, layers)
    if config.model_type != "qwen3_moe":
        return None
    step, dense = config.decoder_sparse_step, set(config.mlp_only_layers or ())
    layers = tuple(i not in dense and (i + 1) % step == 0 for i in range(config.num_hidden_layers))
    return Experts(
        config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size, bool(config.norm_topk_prob), layers
    )
