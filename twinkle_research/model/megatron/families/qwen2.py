"""Qwen2 and Qwen2.5."""

from twinkle_research.model.megatron.families.common import AFTER, ATTENTION, BEFORE, MLP, QKV_BIAS
from twinkle_research.model.megatron.families.rules import Table

TABLE = Table(BEFORE, (*ATTENTION, *QKV_BIAS, *MLP), AFTER)
