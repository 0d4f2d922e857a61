"""Qwen3-MoE. Some layers may be dense."""

from twinkle_research.model.megatron.families.common import AFTER, ATTENTION, BEFORE, MLP, QK_NORM, experts
from twinkle_research.model.megatron.families.rules import Table, Whole

EXPERTS = (
    ("mlp.router.weight", Whole("mlp.gate.weight")),
    *experts(
        gate="mlp.experts.{expert}.gate_proj.weight",
        up="mlp.experts.{expert}.up_proj.weight",
        down="mlp.experts.{expert}.down_proj.weight",
    ),
)

TABLE = Table(BEFORE, (*ATTENTION, *QK_NORM, *MLP, *EXPERTS), AFTER)
