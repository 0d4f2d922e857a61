"""Qwen1.5-MoE and Qwen2-MoE. Some layers may be dense."""

from twinkle_research.model.megatron.families.common import (
    AFTER,
    BEFORE,
    MLP,
    NORMS,
    QKV_AND_OUT,
    QKV_BIAS,
    QWEN_EXPERTS,
    shared_expert,
)
from twinkle_research.model.megatron.families.rules import Table, Whole

SHARED = (
    *shared_expert("mlp.shared_expert"),
    ("mlp.shared_experts.gate.weight", Whole("mlp.shared_expert_gate.weight")),
)

TABLE = Table(BEFORE, (*NORMS, *QKV_AND_OUT, *QKV_BIAS, *MLP, *QWEN_EXPERTS, *SHARED), AFTER)
