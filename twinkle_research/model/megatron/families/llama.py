"""Llama 2 and 3, SmolLM2."""

from twinkle_research.model.megatron.families.common import AFTER, ATTENTION_BIASES, BEFORE, MLP, MLP_BIASES, NORMS, QKV_AND_OUT
from twinkle_research.model.megatron.families.rules import Table

TABLE = Table(BEFORE, (*NORMS, *QKV_AND_OUT, *MLP, *ATTENTION_BIASES, *MLP_BIASES), AFTER)
