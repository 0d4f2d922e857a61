"""Attention of one new token a row, where several query heads share keys and values (Ainslie et al. 2023, arXiv:2305.13245).

With padded rows transformers copies the keys and values of each group once for every query head of it, the whole cache, for
each token. Here the queries of a group are laid side by side instead and attend together: nothing is copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "twinkle_grouped_sdpa"


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    position_bias: Tensor | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """query [B, H, T, D], key and value [B, H / group, S, D] -> [B, T, H, D]."""
    rows, heads, width, size = query.shape
    shared = key.shape[1]
    if width > 1 or shared == heads or position_bias is not None or (attention_mask is not None and attention_mask.shape[1] > 1):
        settings |= {"scaling": scaling, "position_bias": position_bias}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **settings)
    grouped = query.reshape(rows, shared, heads // shared, size)
    out = scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
    return out.reshape(rows, 1, heads, out.shape[-1]), None


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, sdpa_mask)


@contextmanager
def grouped_attention(module: nn.Module) -> Iterator[None]:
    """While it is open, forward passes of one new token a row attend in groups, where the model lets attention be chosen."""
    config = module.config.get_text_config()
    if config._attn_implementation != "sdpa" or not module.is_backend_compatible():
        yield
        return
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = "sdpa"
