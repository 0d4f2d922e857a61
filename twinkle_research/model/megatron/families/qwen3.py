"""Qwen3."""

from twinkle_research.model.megatron.families.common import AFTER, ATTENTION, BEFORE, MLP, QK_NORM
from twinkle_research.model.megatron.families.rules import Table

TABLE = Table(BEFORE, (*ATTENTION, *QK_NORM, *MLP), AFTER)
