"""Mistral."""

from twinkle_research.model.megatron.families.common import AFTER, ATTENTION, BEFORE, MLP
from twinkle_research.model.megatron.families.rules import Table

TABLE = Table(BEFORE, (*ATTENTION, *MLP), AFTER)
