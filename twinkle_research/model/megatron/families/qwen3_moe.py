"""Qwen3-MoE. Some layers may be dense."""

from twinkle_research.model.megatron.families.common import (
    AFTER,
    ATTENTION_BIASES,
    BEFORE,
    MLP,
    NORMS,
    QK_NORM,
    QKV_AND_OUT,
    QWEN_EXPERTS,
)
from twinkle_research.model.megatron.families.rules import Table

TABLE = Table(BEFORE, (*NORMS, *QKV_AND_OUT, *ATTENTION_BIASES, *QK_NORM, *MLP, *QWEN_EXPERTS), AFTER)
