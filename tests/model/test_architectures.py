"""For ten architectures: our log-probabilities are log_softmax of the model's own full logits, and so are the gradients."""

import pytest
import torch
from tiny_models import make_rows

from twinkle_research.errors import ConfigError
from twinkle_research.model.head import LogitTransform
from twinkle_research.model.transformers import TransformersModel
from twinkle_research.model.transformers.head import Anatomy

V = 97
BASE = {
    "vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "initializer_range": 0.3, "pad_token_id": 0,
}  # fmt: skip
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
# name -> (model class, config, what the architecture does to its logits)
ARCHITECTURES = {
    "llama_tied": ("Llama", {"tie_word_embeddings": True}, LogitTransform()),
    "mistral_sliding": ("Mistral", {"sliding_window": 4}, LogitTransform()),
    "qwen2": ("Qwen2", {}, LogitTransform()),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True}, LogitTransform()),
    "qwen3_5": ("Qwen3_5", {"layer_types": ["linear_attention", "full_attention"], **LINEAR}, LogitTransform()),
    "gemma2": (
        "Gemma2",
        {"final_logit_softcapping": 5.0, "query_pre_attn_scalar": 8, "sliding_window": 4},
        LogitTransform(1.0, 5.0),
    ),
    "gemma3": ("Gemma3", {"query_pre_attn_scalar": 8, "sliding_window": 4}, LogitTransform()),
    "cohere": ("Cohere", {"logit_scale": 0.0625}, LogitTransform(0.0625)),
    "granite": ("Granite", {"logits_scaling": 4.0}, LogitTransform(0.25)),
    "gpt2": ("GPT2", {}, LogitTransform()),
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}, LogitTransform()),
    "phi_bias": ("Phi", {}, LogitTransform()),
}


def build(name: str):
    import transformers

    family, options, _ = ARCHITECTURES[name]
    if name == "gpt2":
        sizes = {"vocab_size": V, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.3}
        config = transformers.GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    else:
        config_class = getattr(transformers, f"{family}TextConfig" if family in ("Qwen3_5", "Gemma3") else f"{family}Config")
        config = config_class(**{**BASE, **options})
    torch.manual_seed(0)
    model = getattr(transformers, "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)  # norms and biases too
    return model


@pytest.fixture(scope="module", params=ARCHITECTURES)
def architecture(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    build(request.param).save_pretrained(folder)
    return request.param, folder


def reference(model: TransformersModel, rows):
    """Each row alone through the model's own forward pass: no padding, full logits."""
    logps, total = [], 0.0
    for row in rows:
        logits = model.module(input_ids=torch.tensor([row["input_ids"]]), use_cache=False).logits[0]
        labels = torch.tensor(row["labels"])
        picked = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[:, None]).squeeze(-1) * (labels >= 0)
        logps.append(picked.tolist())
        total = total - picked.sum()
    return logps, total


@pytest.mark.parametrize("side", ["right", "left"])
def test_logprobs_and_gradients_are_the_models_own(architecture, side):
    name, folder = architecture
    # transformers' eager attention, which knows Gemma 2's softcap, cannot mask the queries of padding in float64.
    dtype = "float32" if name in ("qwen3_moe", "gemma2") else "float64"
    model = TransformersModel(folder, dtype=dtype, logits_chunk=5)
    assert model._compute.scorer.transform == ARCHITECTURES[name][2]
    model.set_processor("InputProcessor", micro_batch_size=3, padding_side=side)
    rows = make_rows(5, low=2)
    parameters = model.training_state().parameters
    logps, total = reference(model, rows)
    expected = dict(zip(parameters, torch.autograd.grad(total, list(parameters.values()), allow_unused=True)))

    # These compute their norms or their recurrence in float32 whatever the dtype.
    tolerance = 1e-5 if name in ("qwen3_5", "gemma2", "gemma3", "cohere", "qwen3_moe") else 1e-9
    result = model.forward_backward(rows, normalizer=1).result
    for ours, right in zip(result["logps"], logps):
        assert ours == pytest.approx(right, rel=0, abs=tolerance)
    scale = max(float(g.abs().max()) for g in expected.values() if g is not None)
    for parameter_name, gradient in model.training_state().gradients.tensors().items():
        right = expected[parameter_name]
        assert (gradient - (0 if right is None else right)).abs().max() <= tolerance * scale, parameter_name


def test_save_and_load_under_the_names_of_transformers(architecture, tmp_path):
    """A saved model/ folder is what transformers itself would have written, and optimizer state comes back through it."""
    import transformers
    from safetensors.torch import load_file

    name, folder = architecture
    model = TransformersModel(folder)
    model.set_optimizer("AdamW", lr=1e-2)
    rows = make_rows(4)

    def train(m):
        m.forward_backward(rows, normalizer=m.count(rows))
        m.clip_grad_and_step()

    train(model)
    saved = model.save("one", output_dir=str(tmp_path), save_optimizer=True)
    ours = load_file(f"{saved.checkpoint_dir}/model/model.safetensors")
    model.module.save_pretrained(tmp_path / "theirs")
    theirs = load_file(tmp_path / "theirs" / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    reloaded = transformers.AutoModelForCausalLM.from_pretrained(f"{saved.checkpoint_dir}/model")
    assert all(torch.equal(p, q) for p, q in zip(reloaded.parameters(), model.module.parameters(), strict=True))

    train(model)
    other = TransformersModel(folder)
    other.set_optimizer("AdamW", lr=1e-2)
    other.resume_from_checkpoint(saved)
    train(other)
    for p, q in zip(other.module.parameters(), model.module.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_checkpoint_with_a_vision_tower_trains_its_text_model(tmp_path):
    """Qwen3.5 as it is published: transformers renames the text model's tensors while loading; we write the old names."""
    from safetensors import safe_open
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 32,
        "num_position_embeddings": 16,
    }
    text = {**BASE, **ARCHITECTURES["qwen3_5"][1]}
    torch.manual_seed(0)
    Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=vision)).save_pretrained(tmp_path / "whole")
    model = TransformersModel(tmp_path / "whole")
    model.set_optimizer("AdamW", lr=1e-3)
    rows = make_rows(3)
    model.forward_backward(rows, normalizer=model.count(rows))
    model.clip_grad_and_step()
    saved = model.save("x", str(tmp_path), save_optimizer=True)
    names = set(safe_open(f"{saved.checkpoint_dir}/model/model.safetensors", "pt").keys())
    published = set(safe_open(tmp_path / "whole" / "model.safetensors", "pt").keys())
    assert names == {name for name in published if "visual" not in name}
    moments = set(safe_open(f"{saved.checkpoint_dir}/optimizer/optimizer.safetensors", "pt").keys())
    assert moments == {f"{name}.{slot}" for name in names for slot in ("exp_avg", "exp_avg_sq")}
    logps = model.forward_only(rows).result["logps"]
    assert TransformersModel(f"{saved.checkpoint_dir}/model").forward_only(rows).result["logps"] == logps
    resumed = TransformersModel(tmp_path / "whole")
    resumed.set_optimizer("AdamW", lr=1e-3)
    resumed.resume_from_checkpoint(saved)
    assert resumed.forward_only(rows).result["logps"] == logps


def test_an_unknown_treatment_of_the_logits_is_refused_by_name():
    model = build("llama_tied")
    hook = model.lm_head.register_forward_hook(lambda module, args, output: output + torch.arange(V))
    with pytest.raises(ConfigError, match="LlamaForCausalLM changes its logits"):
        Anatomy.of(model)
    hook.remove()
    assert Anatomy.of(model).transform == LogitTransform()


def test_a_model_without_a_projection_is_refused_by_name():
    with pytest.raises(ConfigError, match="LlamaModel .* not a causal language model"):
        Anatomy.of(build("llama_tied").model)
