"""The layers of this process, as Megatron-Core modules without weights."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from twinkle_research.model.head import LogitTransform
from twinkle_research.model.megatron.blocks import (
    BiasedColumnLinear,
    BiasedRowLinear,
    GatedSharedExpert,
    GroupRouter,
    NormedAdd,
    RotaryKindAttention,
    scaled_add,
)
from twinkle_research.model.megatron.installed import transformer_engine_installed
from twinkle_research.model.megatron.latent import LatentAttention
from twinkle_research.model.megatron.layers import CenteredRMSNorm, DocumentAttention, RMSNorm
from twinkle_research.model.megatron.shim import device_shim
from twinkle_research.model.megatron.variants import GEMMA

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from twinkle_research.model.megatron.architecture import Architecture
    from twinkle_research.model.megatron.mesh import Mesh


class PolicyModel(GPTModel):
    """A stretch of layers. The last one returns its hidden states, [T (/ tensor parallel), 1, D] after the final norm: the
    vocabulary projection is only computed at positions that are trained, elsewhere."""

    first_layer: int  # global number of its first layer
    logits: LogitTransform  # of what the projection gives

    def _postprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states

    @property
    def output_weight(self) -> Tensor:
        """[V / tensor parallel, D], padding included. On the last stage."""
        tied = self.share_embeddings_and_output_weights
        return self.shared_embedding_or_output_weight() if tied else self.output_layer.weight

    def global_name(self, name: str) -> str:
        """A parameter's name with the number of its layer in the whole model."""
        prefix, _, rest = name.partition("decoder.layers.")
        if prefix or not rest:
            return name
        number, _, rest = rest.partition(".")
        return f"decoder.layers.{int(number) + self.first_layer}.{rest}"


def build_chunks(architecture: Architecture, mesh: Mesh, dtype: torch.dtype) -> list[PolicyModel]:
    """This process's chunks (one, or ``virtual_stages``), in training mode and float32 or bfloat16; weights are not set."""
    on_gpu = mesh.runtime.device.type == "cuda"
    wanted = mesh.layout.transformer_engine
    fused = (transformer_engine_installed() and on_gpu) if wanted is None else wanted
    with device_shim():
        config = architecture.transformer_config(mesh, dtype, on_gpu=on_gpu, fused=fused)
        stages = mesh.layout.virtual_stages
        return [_chunk(architecture, mesh, config, i if stages > 1 else None, fused) for i in range(stages)]


def _chunk(architecture: Architecture, mesh: Mesh, config: TransformerConfig, stage: int | None, fused: bool) -> PolicyModel:
    number, last = stage or 0, mesh.layout.virtual_stages - 1
    first_layer = get_transformer_layer_offset(config, vp_stage=stage)
    chunk = PolicyModel(
        config,
        _block_spec(architecture, config, stage, first_layer, fused),
        vocab_size=architecture.padded_vocab(mesh.tp.size),
        max_sequence_length=architecture.config.max_position_embeddings,
        pre_process=mesh.pp.rank == 0 and number == 0,
        post_process=mesh.pp.is_last and number == last,
        share_embeddings_and_output_weights=architecture.tied,
        position_embedding_type="rope",
        vp_stage=stage,
    )
    chunk.first_layer, chunk.logits = first_layer, architecture.logits
    chunk.rotary_pos_emb.inv_freq = architecture.rotary.frequencies.flatten().to(mesh.runtime.device)
    for layer in chunk.decoder.layers:
        layer.bias_dropout_add_exec_handler = nullcontext  # mcore's would keep what a backward pass needs where there is none
    if chunk.pre_process and architecture.embedding_scale != 1.0:
        chunk.embedding.word_embeddings.register_forward_hook(_scaled(architecture))
    padding = architecture.config.pad_token_id
    if chunk.pre_process and padding is not None:
        chunk.embedding.word_embeddings.register_forward_hook(_without_gradient(padding, mesh))
    for name, parameter in chunk.named_parameters():
        parameter.requires_grad_(False)
        # mcore's mark of experts, which it forgets where they are cut otherwise than the rest, but not dealt out: their
        # gradients would be summed over processes that have other parts of them.
        if ".experts." in name and mesh.etp.size != mesh.tp.size:
            parameter.allreduce = False
        # mcore makes routers on the CPU and moves them when they are first used.
        parameter.data = parameter.data.to(mesh.runtime.device)
    return chunk


def _scaled(architecture: Architecture) -> Callable[..., Tensor]:
    """A hook behind the embeddings of tokens: multiplies them, Gemma's by a number that is rounded first."""
    scale = architecture.embedding_scale

    def hook(module: Any, args: tuple[Tensor, ...], embedded: Tensor) -> Tensor:
        rounded = torch.tensor(scale, dtype=embedded.dtype, device=embedded.device)
        return embedded * (rounded if architecture.family in GEMMA else scale)

    return hook


def _without_gradient(token: int, mesh: Mesh) -> Callable[..., Tensor]:
    """A hook behind the embeddings of tokens: as transformers', that of the padding token learns nothing from where it is read.
    It may well stand in rows: for many models it is the token that ends a turn."""

    def hook(module: Any, args: tuple[Tensor, ...], embedded: Tensor) -> Tensor:
        here = args[0] == token  # [1, T]
        if mesh.sequence_parallel:  # embedded is [T / tensor parallel, 1, D] then
            here = here.T.chunk(mesh.tp.size)[mesh.tp.rank]
        return torch.where(here[..., None], embedded.detach(), embedded)

    return hook


def _block_spec(
    architecture: Architecture, config: TransformerConfig, stage: int | None, first: int, fused: bool
) -> TransformerBlockSubmodules:
    """mcore's own layers but for norm and core attention, so that names and mapping are the same on every device."""
    norm: Any = CenteredRMSNorm if architecture.centered_norms else RMSNorm
    if fused:
        from megatron.core.extensions.transformer_engine import TENorm

        norm = TENorm
    layers = [
        _layer_spec(architecture, config, number, norm, fused)
        for number in range(first, first + get_num_layers_to_build(config, vp_stage=stage))
    ]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=norm)


def _layer_spec(architecture: Architecture, config: TransformerConfig, number: int, norm: Any, fused: bool) -> ModuleSpec:
    experts = architecture.experts
    mixture = experts is not None and experts.layers[number]
    spec = get_gpt_layer_local_spec(
        num_experts=experts.count if mixture else None, moe_grouped_gemm=False, qk_layernorm=architecture.qk_norm,
        normalization="RMSNorm",
    )  # fmt: skip
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = norm
    if architecture.latent is not None:
        parts = {"latent": architecture.latent, "rotary_scale": architecture.rotary.scale, "norm": norm}
        layer.self_attention = ModuleSpec(module=LatentAttention, params=parts)
    else:
        _set_attention(layer.self_attention, architecture, number, norm, fused)
    if mixture and experts.groups is not None:
        layer.mlp.submodules.router = partial(GroupRouter, groups=experts.groups)
    if mixture and experts.gated_share:
        layer.mlp.submodules.shared_experts.module = GatedSharedExpert
    if architecture.mlp_bias:
        layer.mlp.submodules.linear_fc1, layer.mlp.submodules.linear_fc2 = BiasedColumnLinear, BiasedRowLinear
    if architecture.residual_scale != 1.0:
        layer.self_attn_bda = layer.mlp_bda = scaled_add(architecture.residual_scale)
    if architecture.sandwich_norms:
        layer.self_attn_bda = layer.mlp_bda = ModuleSpec(module=NormedAdd, params={"config": config, "norm": norm})
    return spec


def _set_attention(spec: ModuleSpec, architecture: Architecture, number: int, norm: Any, fused: bool) -> None:
    parts = spec.submodules
    if architecture.qk_norm:
        parts.q_layernorm = parts.k_layernorm = norm
    window, softcap = architecture.windows[number], architecture.attention_softcap
    if fused and window is None and softcap is None:
        from megatron.core.extensions.transformer_engine import TEDotProductAttention

        parts.core_attention = TEDotProductAttention
    else:
        parts.core_attention = ModuleSpec(module=DocumentAttention, params={"window": window, "softcap": softcap})
    kinds = len(architecture.rotary.frequencies)
    if kinds > 1:
        spec.module = RotaryKindAttention
        spec.params |= {"kind": architecture.rotary.kinds[number], "kinds": kinds}
    if architecture.output_bias:
        parts.linear_proj = BiasedRowLinear
