"""Variants of the parts of Megatron-Core's layers that families have and it does not: small changes around its own modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from torch import Tensor, nn


class BiasedColumnLinear(ColumnParallelLinear):
    """With a bias where mcore's config, which has all biases or none, would not give it one."""

    def __init__(self, *args: Any, bias: bool, **settings: Any) -> None:
        super().__init__(*args, bias=True, **settings)


class BiasedRowLinear(RowParallelLinear):
    """As BiasedColumnLinear."""

    def __init__(self, *args: Any, bias: bool, **settings: Any) -> None:
        super().__init__(*args, bias=True, **settings)


class NormedAdd(MegatronModule):
    """In the place of mcore's bias-dropout-add: a norm stands behind attention or MLP, before the sum (Gemma 2)."""

    def __init__(self, config: TransformerConfig, norm: Callable[..., nn.Module]) -> None:
        super().__init__(config=config)
        self.norm = norm(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]:
        return self._add

    def _add(self, output_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
        output, bias = output_with_bias
        return residual + self.norm(output if bias is None else output + bias)


def scaled_add(scale: float) -> Callable[[bool, bool], Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]]:
    """In the place of mcore's bias-dropout-add: what attention or MLP gives is multiplied before the sum (Granite)."""

    def add(output_with_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
        output, bias = output_with_bias
        return residual + (output if bias is None else output + bias) * scale

    def build(training: bool, fused: bool) -> Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]:
        return add

    return build


class RotaryKindAttention(SelfAttention):
    """``kind``: which of the ``kinds`` of rotary embeddings, that the model has side by side, this layer is rotated by
    (Gemma 3)."""

    def __init__(self, *args: Any, kind: int, kinds: int, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.kind, self.kinds = kind, kinds

    def forward(self, hidden_states: Tensor, *args: Any, rotary_pos_emb: Tensor, **settings: Any) -> tuple[Tensor, Tensor | None]:
        """``rotary_pos_emb``: [T, 1, 1, 2 * kinds * D / 2]."""
        own = rotary_pos_emb.unflatten(-1, (2, self.kinds, -1))[..., self.kind, :].flatten(-2)
        return super().forward(hidden_states, *args, rotary_pos_emb=own, **settings)


class WholeLinear(MegatronModule):
    """A linear layer that every process has whole. Under sequence parallelism each sees its part of the sequence."""

    def __init__(self, config: TransformerConfig, inputs: int, outputs: int) -> None:
        super().__init__(config=config)
        weight = torch.empty(outputs, inputs, dtype=config.params_dtype, device=torch.cuda.current_device())
        self.weight = nn.Parameter(weight)
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return F.linear(x, self.weight), None


class GatedSharedExpert(SharedExpertMLP):
    """As mcore's own with a gate (Qwen2-MoE), which is a module here, so that it can have a LoRA."""

    def __init__(self, config: TransformerConfig, submodules: MLPSubmodules, gate: bool, **settings: Any) -> None:
        super().__init__(config, submodules, gate=False, **settings)
        self.gate = WholeLinear(config, config.hidden_size, 1)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states) * torch.sigmoid(self.gate(hidden_states)[0])


class GroupRouter(TopKRouter):
    """Experts lie in ``groups[0]`` equal groups. A token chooses ``groups[1]`` of them by the best expert of each, then experts
    in those (DeepSeek-V2). mcore's own goes by the sum of a group's best ones."""

    def __init__(self, *args: Any, groups: tuple[int, int], **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.groups = groups

    def routing(self, logits: Tensor, *args: Any, **settings: Any) -> tuple[Tensor, Tensor]:
        """[..., E] -> [T, E] weights, and which of them are meant."""
        scores_TE = logits.flatten(0, -2).softmax(-1, dtype=torch.float32)
        count, chosen = self.groups
        best = scores_TE.unflatten(-1, (count, -1)).amax(-1).topk(chosen, dim=-1).indices
        open_TG = torch.zeros(len(scores_TE), count, dtype=torch.bool, device=logits.device).scatter_(1, best, True)
        open_TE = open_TG.repeat_interleave(scores_TE.shape[1] // count, dim=1)
        weights, experts = scores_TE.masked_fill(~open_TE, 0.0).topk(self.topk, dim=-1)
        scale = self.config.moe_router_topk_scaling_factor or 1.0
        weights_TE = torch.zeros_like(scores_TE).scatter(1, experts, weights * scale)
        return weights_TE.to(logits.dtype), torch.zeros_like(open_TE).scatter_(1, experts, True)
