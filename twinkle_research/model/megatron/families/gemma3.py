"""The language model of Gemma 3."""

from twinkle_research.model.megatron.families.common import (
    AFTER,
    ATTENTION_BIASES,
    BEFORE,
    MLP,
    QK_NORM,
    QKV_AND_OUT,
    SANDWICH_NORMS,
)
from twinkle_research.model.megatron.families.rules import Table

TABLE = Table(BEFORE, (*SANDWICH_NORMS, *QKV_AND_OUT, *ATTENTION_BIASES, *QK_NORM, *MLP), AFTER)
