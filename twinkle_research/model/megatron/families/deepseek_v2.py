"""DeepSeek-V2 and V2-Lite. The first layers may be dense."""

from twinkle_research.model.megatron.families.common import AFTER, BEFORE, MLP, NORMS, QWEN_EXPERTS, shared_expert
from twinkle_research.model.megatron.families.rules import Columns, Outputs, Table, Whole

LATENT = (
    ("self_attention.linear_q.weight", Outputs("self_attn.q_proj.weight")),
    ("self_attention.linear_q_down.weight", Outputs("self_attn.q_a_proj.weight")),
    ("self_attention.q_norm.weight", Whole("self_attn.q_a_layernorm.weight")),
    ("self_attention.linear_q_up.weight", Outputs("self_attn.q_b_proj.weight")),
    ("self_attention.linear_kv_down.weight", Outputs("self_attn.kv_a_proj_with_mqa.weight")),
    ("self_attention.kv_norm.weight", Whole("self_attn.kv_a_layernorm.weight")),
    ("self_attention.linear_kv_up.weight", Outputs("self_attn.kv_b_proj.weight")),
    ("self_attention.linear_proj.weight", Columns("self_attn.o_proj.weight")),
)

TABLE = Table(BEFORE, (*NORMS, *LATENT, *MLP, *QWEN_EXPERTS, *shared_expert("mlp.shared_experts")), AFTER)
