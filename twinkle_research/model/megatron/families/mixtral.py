"""Mixtral, with the names of its files (transformers has others in memory)."""

from twinkle_research.model.megatron.families.common import AFTER, BEFORE, NORMS, QKV_AND_OUT, experts
from twinkle_research.model.megatron.families.rules import Table, Whole

EXPERTS = (
    ("mlp.router.weight", Whole("block_sparse_moe.gate.weight")),
    *experts(
        gate="block_sparse_moe.experts.{expert}.w1.weight",
        up="block_sparse_moe.experts.{expert}.w3.weight",
        down="block_sparse_moe.experts.{expert}.w2.weight",
    ),
)

TABLE = Table(BEFORE, (*NORMS, *QKV_AND_OUT, *EXPERTS), AFTER)
