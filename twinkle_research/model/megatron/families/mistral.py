"""Mistral."""

from twinkle_research.model.megatron.families.common import AFTER, BEFORE, MLP, NORMS, QKV_AND_OUT
from twinkle_research.model.megatron.families.rules import Table

TABLE = Table(BEFORE, (*NORMS, *QKV_AND_OUT, *MLP), AFTER)
