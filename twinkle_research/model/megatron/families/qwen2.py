"""Qwen2 and Qwen2.5."""

from twinkle_research.model.megatron.families.common import AFTER, BEFORE, MLP, NORMS, QKV_AND_OUT, QKV_BIAS
from twinkle_research.model.megatron.families.rules import Table

TABLE = Table(BEFORE, (*NORMS, *QKV_AND_OUT, *QKV_BIAS, *MLP), AFTER)
