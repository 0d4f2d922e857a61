"""Qwen3."""

from twinkle_research.model.megatron.families.common import AFTER, ATTENTION_BIASES, BEFORE, MLP, NORMS, QK_NORM, QKV_AND_OUT
from twinkle_research.model.megatron.families.rules import Table

TABLE = Table(BEFORE, (*NORMS, *QKV_AND_OUT, *ATTENTION_BIASES, *QK_NORM, *MLP), AFTER)
