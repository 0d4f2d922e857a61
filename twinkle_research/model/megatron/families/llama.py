"""Llama 2 and 3, SmolLM2."""

from twinkle_research.model.megatron.families.common import AFTER, ATTENTION, BEFORE, MLP, OTHER_BIASES, QKV_BIAS
from twinkle_research.model.megatron.families.rules import Table

TABLE = Table(BEFORE, (*ATTENTION, *MLP, *QKV_BIAS, *OTHER_BIASES), AFTER)
