"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) out of Megatron-Core's parallel linear layers.

Its own MLASelfAttention reckons rotary embeddings otherwise than transformers, and leaves the gradient of the rotated part of
the keys, which all heads share, unsummed over the processes that have the heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    checkpoint,
    copy_to_tensor_model_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from twinkle_research.model.megatron.layers import DocumentAttention

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams

    from twinkle_research.model.megatron.variants import Latent


class LatentAttention(MegatronModule):
    """Queries and keys have a part that knows the content and one that is rotated; keys and values come out of one narrow
    vector for each token. ``rotary_scale`` multiplies cosines and sines."""

    def __init__(
        self, config: TransformerConfig, layer_number: int, *, latent: Latent, rotary_scale: float, norm: type[nn.Module],
        pg_collection: ProcessGroupCollection | None = None, **_: Any,
    ) -> None:  # fmt: skip
        super().__init__(config=config)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.tensor, self.context = groups.tp, groups.cp
        self.latent, self.rotary_scale = latent, rotary_scale
        heads, width = config.num_attention_heads, latent.content + latent.rotated

        def column(inputs: int, outputs: int) -> ColumnParallelLinear:
            return ColumnParallelLinear(
                inputs, outputs, config=config, init_method=config.init_method, bias=False, gather_output=False,
                skip_bias_add=False, tp_group=self.tensor,
            )  # fmt: skip

        def own_norm(size: int) -> nn.Module:
            return norm(config=config, hidden_size=size, eps=latent.norm_eps)

        if latent.query_rank is None:
            self.linear_q = column(config.hidden_size, heads * width)
        else:
            self.linear_q_down = column(config.hidden_size, latent.query_rank)
            self.q_norm = own_norm(latent.query_rank)
            self.linear_q_up = column(latent.query_rank, heads * width)
        self.linear_kv_down = column(config.hidden_size, latent.rank + latent.rotated)
        self.kv_norm = own_norm(latent.rank)
        self.linear_kv_up = column(latent.rank, heads * (latent.content + latent.value))
        self.core_attention = DocumentAttention(
            config, layer_number, AttnMaskType.causal, "self", softmax_scale=config.softmax_scale, pg_collection=groups
        )
        self.linear_proj = RowParallelLinear(
            heads * latent.value, config.hidden_size, config=config, init_method=config.output_layer_init_method, bias=False,
            input_is_parallel=True, skip_bias_add=True, tp_group=self.tensor,
        )  # fmt: skip

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, *, rotary_pos_emb: Tensor,
        packed_seq_params: PackedSeqParams, **_: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """hidden_states [T (/ tensor parallel), 1, hidden] -> the same; thd batches only."""
        query = self._query(hidden_states)
        key, value = self._key_and_value(hidden_states)
        ends = packed_seq_params.cu_seqlens_q_padded
        query, key = (self._rotated(x, rotary_pos_emb, ends) for x in (query, key))
        return self.linear_proj(self._attend(query, key, value, packed_seq_params)[:, None])

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSeqParams) -> Tensor:
        def attend(*qkv: Tensor) -> Tensor:
            return self.core_attention(*qkv, None, packed_seq_params=packed)

        if self.training and self.config.recompute_granularity == "selective":
            return checkpoint(attend, False, query, key, value)
        return attend(query, key, value)

    def _query(self, hidden_states: Tensor) -> Tensor:
        """[T, heads here, content + rotated]."""
        if self.latent.query_rank is None:
            query, _ = self.linear_q(hidden_states)
        else:
            low = self._along_sequence(self._whole(self.linear_q_down(hidden_states)[0]))
            query, _ = self.linear_q_up(self.q_norm(low))
        return query.squeeze(1).unflatten(-1, (-1, self.latent.content + self.latent.rotated))

    def _key_and_value(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """[T, heads here, content + rotated], [T, heads here, value]."""
        latent = self.latent
        low, rotated = self._whole(self.linear_kv_down(hidden_states)[0]).split([latent.rank, latent.rotated], dim=-1)
        both, _ = self.linear_kv_up(self.kv_norm(self._along_sequence(low)))
        both = both.squeeze(1).unflatten(-1, (-1, latent.content + latent.value))
        content, value = both.split((latent.content, latent.value), dim=-1)
        # Each process has the gradient that comes from its own heads.
        rotated = copy_to_tensor_model_parallel_region(rotated, self.tensor).squeeze(1)[:, None]
        return torch.cat((content, rotated.expand(-1, content.shape[1], -1)), dim=-1), value

    def _whole(self, parts: Tensor) -> Tensor:
        return gather_from_tensor_model_parallel_region(parts, self.tensor)

    def _along_sequence(self, x: Tensor) -> Tensor:
        return scatter_to_sequence_parallel_region(x, self.tensor) if self.config.sequence_parallel else x

    def _rotated(self, x: Tensor, rotary_pos_emb: Tensor, ends: Tensor) -> Tensor:
        """Here pairs of neighbours are rotated: they come to where mcore has pairs, in queries and keys alike."""
        content, rotated = x.split((self.latent.content, self.latent.rotated), dim=-1)
        halves = torch.cat((rotated[..., 0::2], rotated[..., 1::2]), dim=-1)
        turned = apply_rotary_pos_emb(
            halves, rotary_pos_emb, config=self.config, cu_seqlens=ends, mscale=self.rotary_scale, cp_group=self.context
        )
        return torch.cat((content, turned), dim=-1)
