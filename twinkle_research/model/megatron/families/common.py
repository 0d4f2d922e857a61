"""Rows that families share."""

from twinkle_research.model.megatron.families.rules import QKV, Columns, Gated, Rows, Vocabulary, Whole

BEFORE: Rows = (("embedding.word_embeddings.weight", Vocabulary("model.embed_tokens.weight")),)

AFTER: Rows = (
    ("decoder.final_layernorm.weight", Whole("model.norm.weight")),
    ("output_layer.weight", Vocabulary("lm_head.weight", tied="model.embed_tokens.weight")),
)

NORMS: Rows = (
    ("input_layernorm.weight", Whole("input_layernorm.weight")),
    ("pre_mlp_layernorm.weight", Whole("post_attention_layernorm.weight")),
)

# Norms behind attention and MLP, too.
SANDWICH_NORMS: Rows = (
    ("input_layernorm.weight", Whole("input_layernorm.weight")),
    ("self_attn_bda.norm.weight", Whole("post_attention_layernorm.weight")),
    ("pre_mlp_layernorm.weight", Whole("pre_feedforward_layernorm.weight")),
    ("mlp_bda.norm.weight", Whole("post_feedforward_layernorm.weight")),
)

QKV_AND_OUT: Rows = (
    ("self_attention.linear_qkv.weight", QKV("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")),
    ("self_attention.linear_proj.weight", Columns("self_attn.o_proj.weight")),
)

QKV_BIAS: Rows = (
    ("self_attention.linear_qkv.bias", QKV("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias")),
)

QK_NORM: Rows = (
    ("self_attention.q_layernorm.weight", Whole("self_attn.q_norm.weight")),
    ("self_attention.k_layernorm.weight", Whole("self_attn.k_norm.weight")),
)

MLP: Rows = (
    ("mlp.linear_fc1.weight", Gated("mlp.gate_proj.weight", "mlp.up_proj.weight")),
    ("mlp.linear_fc2.weight", Columns("mlp.down_proj.weight")),
)

ATTENTION_BIASES: Rows = (*QKV_BIAS, ("self_attention.linear_proj.bias", Whole("self_attn.o_proj.bias")))

MLP_BIASES: Rows = (
    ("mlp.linear_fc1.bias", Gated("mlp.gate_proj.bias", "mlp.up_proj.bias")),
    ("mlp.linear_fc2.bias", Whole("mlp.down_proj.bias")),
)


def experts(gate: str, up: str, down: str) -> Rows:
    """Both forms that experts have: a module each, or (Transformer Engine's grouped products) all in one."""
    return (
        ("mlp.experts.local_experts.{expert}.linear_fc1.weight", Gated(gate, up)),
        ("mlp.experts.local_experts.{expert}.linear_fc2.weight", Columns(down)),
        ("mlp.experts.linear_fc1.weight{expert}", Gated(gate, up)),
        ("mlp.experts.linear_fc2.weight{expert}", Columns(down)),
    )


QWEN_EXPERTS: Rows = (
    ("mlp.router.weight", Whole("mlp.gate.weight")),
    *experts(
        gate="mlp.experts.{expert}.gate_proj.weight",
        up="mlp.experts.{expert}.up_proj.weight",
        down="mlp.experts.{expert}.down_proj.weight",
    ),
)


def shared_expert(name: str) -> Rows:
    """The expert that all tokens see."""
    return (
        ("mlp.shared_experts.linear_fc1.weight", Gated(f"{name}.gate_proj.weight", f"{name}.up_proj.weight")),
        ("mlp.shared_experts.linear_fc2.weight", Columns(f"{name}.down_proj.weight")),
    )
