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

from twinkle_research.errors import ConfigError
from twinkle_research.model.head import LogitTransform
from twinkle_research.model.megatron.config import MODEL_TYPES, MegatronBackendConfig, Recompute, no_counterpart
from twinkle_research.model.megatron.variants import (
    GEMMA,
    Experts,
    Latent,
    Rotary,
    has_bias,
    read_experts,
    read_latent,
    read_logits,
    read_rotary,
    read_windows,
    refuse_variants,
    softmax_scale,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from twinkle_research.model.megatron.mesh import Mesh


@dataclass(frozen=True)
class Architecture:
    """What is needed to build the model and to find its tensors. ``windows``: per layer the tokens that a token sees, None:
    all before it. ``logits``: what is done to the logits behind the projection."""

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
    output_bias: bool  # of the attention
    mlp_bias: bool
    centered_norms: bool  # whether the weights of norms are stored as their difference from 1
    sandwich_norms: bool  # behind attention and MLP, too
    embedding_scale: float
    residual_scale: float  # of what attention and MLP add
    softmax_scale: float  # of products of queries and keys
    attention_softcap: float | None
    logits: LogitTransform
    windows: tuple[int | None, ...]
    rotary: Rotary
    latent: Latent | None
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
            raise ConfigError(no_counterpart(str(folder), family))
        refuse_variants(config)
        heads = config.num_attention_heads
        latent, rotary = read_latent(config), read_rotary(config)
        if latent is None:
            head_dim = rotated = getattr(config, "head_dim", None) or config.hidden_size // heads
        else:
            head_dim, rotated = latent.content + latent.rotated, latent.rotated
        if rotary.frequencies.shape[1] * 2 != rotated:
            raise ConfigError(f"model type {family} rotates a part of each head only, which backend=megatron does not know")
        biased, gemma = has_bias(config, "attention_bias"), family in GEMMA
        softcap = config.attn_logit_softcapping if family == "gemma2" else None
        return cls(
            config=config, family=family, num_layers=config.num_hidden_layers, hidden_size=config.hidden_size, num_heads=heads,
            num_kv_heads=config.num_key_value_heads or heads, head_dim=head_dim, intermediate_size=config.intermediate_size,
            vocab_size=config.vocab_size, tied=bool(config.tie_word_embeddings),
            qk_norm=family in ("qwen3", "qwen3_moe", "gemma3_text"), output_bias=biased,
            qkv_bias=biased or family == "qwen2" or has_bias(config, "qkv_bias"), mlp_bias=has_bias(config, "mlp_bias"),
            centered_norms=gemma, sandwich_norms=family in ("gemma2", "gemma3_text"),
            embedding_scale=config.hidden_size**0.5 if gemma else getattr(config, "embedding_multiplier", 1.0),
            residual_scale=getattr(config, "residual_multiplier", 1.0),
            softmax_scale=softmax_scale(config, head_dim), attention_softcap=softcap, latent=latent, logits=read_logits(config),
            windows=read_windows(config), rotary=rotary, experts=read_experts(config),
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
                "moe_router_topk_scaling_factor": None if experts.scale == 1.0 else experts.scale,
                "moe_router_dtype": "fp32" if experts.exact_router else None,
                "moe_shared_expert_intermediate_size": experts.shared_size or None,
            }  # fmt: skip
        config = TransformerConfig(
            num_layers=self.num_layers, hidden_size=self.hidden_size, num_attention_heads=self.num_heads,
            num_query_groups=self.num_kv_heads, kv_channels=self.head_dim, ffn_hidden_size=self.intermediate_size,
            normalization="RMSNorm", layernorm_epsilon=self.config.rms_norm_eps, gated_linear_unit=True, add_bias_linear=False,
            activation_func=_gelu if self.family in GEMMA else F.silu, add_qkv_bias=self.qkv_bias, qk_layernorm=self.qk_norm,
            softmax_scale=self.softmax_scale, layernorm_zero_centered_gamma=self.centered_norms, hidden_dropout=0.0,
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
            bias_activation_fusion=on_gpu and self.family not in GEMMA, bias_dropout_fusion=on_gpu,
            masked_softmax_fusion=False, apply_rope_fusion=False,
            gradient_accumulation_fusion=False, persist_layer_norm=fused, attention_softmax_in_fp32=False,
            **_recompute(layout), **mixture,
        )  # fmt: skip
        if self.rotary.scale != 1.0:
            # By these mcore reckons what it multiplies cosines and sines by: 1 + 0.1 * yarn_mscale * log(factor), here so that
            # it comes to rotary.scale.
            config.yarn_rotary_scaling_factor = math.e
            config.yarn_mscale, config.yarn_mscale_all_dim = 10 * (self.rotary.scale - 1), 0.0
        return config


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


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
