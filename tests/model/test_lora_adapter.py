"""What LoRA settings do, and that wrong ones are refused by name."""

import dataclasses

import pytest
import torch
from peft import LoraConfig, LoraRuntimeConfig, PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file
from tiny_models import make_rows

from twinkle_research.errors import CheckpointError, ConfigError, UserError
from twinkle_research.model import lora_config
from twinkle_research.model.config import LoraAdapterConfig
from twinkle_research.model.facts import linear_module_names
from twinkle_research.model.transformers import MultiLoraTransformersModel, TransformersModel


def add(folder, config, dtype="float32", **options):
    model = TransformersModel(folder, dtype=dtype, **options)
    model.add_adapter_to_model("default", config)
    return model


def train(model, rows, steps=2):
    model.set_optimizer("AdamW", lr=1e-2)
    for _ in range(steps):
        model.forward_backward(rows, normalizer=model.count(rows))
        model.clip_grad_and_step()


def adapted(model):
    return sorted({name.split(".lora_A")[0] for name in model.training_state().parameters if ".lora_A" in name})


@pytest.fixture(scope="module")
def untied_llama(tmp_path_factory):
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("untied")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_s19_all_linear_is_every_layers_seven(tiny_llama):
    names = adapted(add(tiny_llama, LoraAdapterConfig()))
    assert len(names) == 14 and not any("lm_head" in name or "embed" in name for name in names)
    assert len(adapted(add(tiny_llama, LoraConfig(target_modules="all-linear")))) == 14
    assert len(adapted(add(tiny_llama, LoraConfig(target_modules=r".*\.(q|v)_proj")))) == 4


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LoraAdapterConfig(target_modules=["q_proj", "v_porj"]), "no module named 'v_porj'; did you mean 'v_proj'"),
        (LoraAdapterConfig(modules_to_save=["embed_token"]), "modules_to_save: .*'embed_token'; did you mean 'embed_tokens'"),
        (LoraAdapterConfig(target_modules=["mlp"]), "names model.layers.0.mlp, a LlamaMLP"),
        (LoraAdapterConfig(target_modules=["q_proj", "lm_head"]), "share one weight.*modules_to_save=.lm_head."),
        (LoraAdapterConfig(target_modules=["embed_tokens"]), "would untie"),
        (LoraConfig(target_modules=["q_proj"], init_lora_weights="pissa"), "init_lora_weights='pissa'"),
        (LoraConfig(target_modules=["q_proj"], bias="all"), "biases"),
        (LoraAdapterConfig(dropout=1.0), "adapter.dropout"),
        (LoraAdapterConfig(alpha=0.0), "adapter.alpha must be finite and > 0"),
        (LoraConfig(target_modules=["q_proj"], exclude_modules=["k_proj"]), "exclude_modules: 'k_proj' excludes nothing"),
        (LoraConfig(target_modules=["q_proj"], exclude_modules="q_proj"), "exclude_modules: 'q_proj' excludes nothing"),
        (LoraConfig(target_modules=["q_proj"], exclude_modules=["q_proj"]), "no module is left"),
        (LoraConfig(target_modules=["q_proj"], layers_to_transform=[1, 2]), "layers_to_transform: .* layer 2"),
        (LoraConfig(target_modules=["q_proj"], layers_to_transform=1, layers_pattern="h"), "layers_to_transform: .* layer 1"),
        (LoraConfig(target_modules=["q_proj"], rank_pattern={"q_porj": 2}), "rank_pattern: 'q_porj' .*did you mean 'q_proj'"),
        (LoraConfig(target_modules=["q_proj"], rank_pattern={"q_proj": 0}), "must be a whole number >= 1, got 0"),
        (LoraConfig(target_modules=["q_proj"], alpha_pattern={"v_proj": 2}), "alpha_pattern: 'v_proj' fits no module"),
        (LoraConfig(target_modules=["q_proj", "norm"], modules_to_save=["norm"]), "norm cannot be in both"),
        (LoraConfig(target_modules=[]), "target_modules is empty"),
        (LoraConfig(target_modules=["q_proj"], task_type="SEQ_CLS"), "task_type='SEQ_CLS'"),
        ({"r": 4}, r"given by a peft LoraConfig.*got \{'r': 4\}; write LoraConfig"),
        (None, "given by a peft LoraConfig.*got None"),
    ],
)
def test_s19_wrong_settings(tiny_llama, config, message):
    with pytest.raises(ConfigError, match=message):
        add(tiny_llama, config)


# A value other than the default for every field of PEFT's LoraConfig that is refused as a whole.
REFUSED = {
    "megatron_config": {"a": 1}, "megatron_core": "other", "trainable_token_indices": [1, 2, 3], "loftq_config": {"bits": 4},
    "eva_config": {}, "corda_config": {}, "lora_ga_config": {}, "velora_config": {"num_groups": 2},
    "alora_invocation_tokens": [1],
    "use_qalora": True, "qalora_group_size": 8, "monteclora_config": {}, "layer_replication": [(0, 1)],
    "runtime_config": LoraRuntimeConfig(ephemeral_gpu_offload=True), "target_parameters": ["x"], "use_bdlora": {},
    "arrow_config": {}, "kasa_config": {},
}  # fmt: skip


def test_every_field_of_peft_is_supported_or_refused(tiny_llama):
    """The model stays whole where one is refused: layer_replication, for one, would cut the base for all adapters."""
    known = {field.name for field in dataclasses.fields(LoraConfig)}
    assert known == lora_config._SUPPORTED | lora_config._OF_THE_FILE | REFUSED.keys()
    model = MultiLoraTransformersModel(tiny_llama)
    model.add_adapter_to_model("first", LoraConfig(target_modules="all-linear"))
    before = model.forward_only(make_rows(2), adapter_name="first").result["logps"]
    for name, value in REFUSED.items():
        config = LoraConfig(r=4, target_modules="all-linear")
        setattr(config, name, value)
        with pytest.raises(ConfigError, match=rf"LoraConfig.{name}=.* is not supported; what is: alpha_pattern, "):
            model.add_adapter_to_model("second", config)
    assert model.adapters == ["first"]
    assert model.forward_only(make_rows(2), adapter_name="first").result["logps"] == before


def test_parts_of_the_model_as_peft_chooses_them(tiny_llama):
    assert adapted(add(tiny_llama, KINDS["parts"])) == [
        f"base_model.model.model.layers.1.{n}" for n in ("mlp.up_proj", "self_attn.q_proj")
    ]
    without = LoraConfig(target_modules="all-linear", exclude_modules=r".*_proj", inference_mode=True)
    with pytest.raises(ConfigError, match="no module is left"):
        add(tiny_llama, without)
    without.exclude_modules = r".*layers\.0\..*"
    model = add(tiny_llama, without)
    assert len(adapted(model)) == 7 and all(p.requires_grad for p in model.training_state().parameters.values())


@pytest.mark.parametrize("rank", [0, -5, 1.5, True])
def test_s19_wrong_ranks(tiny_llama, rank):
    with pytest.raises((ConfigError, ValueError), match="r"):
        add(tiny_llama, LoraAdapterConfig(r=rank))


def test_starts_as_the_base_model_drawn_by_key(tiny_llama):
    rows = make_rows(3)
    base = TransformersModel(tiny_llama).forward_only(rows).result["logps"]
    torch.manual_seed(99)
    model = add(tiny_llama, LoraAdapterConfig(r=4), seed=7)
    assert model.forward_only(rows).result["logps"] == base
    parameters = model.training_state().parameters
    torch.manual_seed(1)
    fewer = add(tiny_llama, LoraAdapterConfig(r=4, target_modules=["v_proj"]), seed=7).training_state().parameters
    for name, p in fewer.items():  # no draw depends on how many came before it
        assert torch.equal(p, parameters[name])
    a = [p for name, p in parameters.items() if ".lora_A" in name]
    b = [p for name, p in parameters.items() if ".lora_B" in name]
    assert all((p.abs() <= p.shape[1] ** -0.5).all() and p.std() > 0.4 * p.shape[1] ** -0.5 for p in a)
    assert all((p == 0).all() for p in b) and all(p.dtype == torch.float32 for p in a + b)
    other = add(tiny_llama, LoraAdapterConfig(r=4), seed=8).training_state().parameters
    assert not any(torch.equal(p, other[name]) for name, p in parameters.items() if ".lora_A" in name)


KINDS = {
    "plain": LoraAdapterConfig(r=4),
    "rslora": LoraAdapterConfig(r=4, rslora=True),
    "dora": LoraAdapterConfig(r=4, dora=True),
    "embeddings": LoraAdapterConfig(r=4, modules_to_save=["embed_tokens"]),
    "head": LoraAdapterConfig(r=4, modules_to_save=["lm_head"]),
    "norm": LoraAdapterConfig(r=4, modules_to_save=["norm"]),
    "parts": LoraConfig(
        r=4, target_modules=["q_proj", "up_proj", "down_proj"], exclude_modules=["down_proj"], layers_to_transform=[1],
        layers_pattern="layers", rank_pattern={"up_proj": 2}, alpha_pattern={"q_proj": 3.5}, use_rslora=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", KINDS)
def test_saved_folder_is_pefts_and_merged_weights_agree(tiny_llama, untied_llama, kind, tied, dtype, tmp_path):
    from transformers import AutoModelForCausalLM

    folder = tiny_llama if tied else untied_llama
    rows = make_rows(4)
    model = add(folder, KINDS[kind], dtype)
    train(model, rows)
    after = model.forward_only(rows).result["logps"]
    saved = model.save("x", output_dir=str(tmp_path))
    ours = load_file(f"{saved.checkpoint_dir}/adapter/adapter_model.safetensors")
    theirs = get_peft_model_state_dict(model.module)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[k], theirs[k].cpu()) for k in ours)

    base = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    reloaded = PeftModel.from_pretrained(base, f"{saved.checkpoint_dir}/adapter")
    logits = reloaded(input_ids=torch.tensor([rows[0]["input_ids"]])).logits[0].float()
    labels = torch.tensor(rows[0]["labels"])
    logps = (logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[:, None]).squeeze(-1) * (labels >= 0)).tolist()
    assert logps == pytest.approx(after[0], abs=1e-5 if dtype == "float32" else 0.1)

    started_from_it = TransformersModel(folder, dtype=dtype)
    started_from_it.add_adapter_to_model("default", f"{saved.checkpoint_dir}/adapter")
    assert started_from_it.forward_only(rows).result["logps"] == after

    merged = dict(model.named_weights())
    plain = TransformersModel(folder, dtype=dtype)
    assert merged.keys() == dict(plain.module.named_parameters()).keys()
    with torch.no_grad():
        for name, parameter in plain.module.named_parameters():
            parameter.copy_(merged[name])
    for mine, right in zip(plain.forward_only(rows).result["logps"], after):
        assert mine == pytest.approx(right, abs=1e-4 if dtype == "float32" else 0.15)


def test_tied_embeddings_stay_tied(tiny_llama):
    """Both the embedding and the head use, and train, one copy."""
    model = add(tiny_llama, KINDS["embeddings"])
    names = [name for name in model.training_state().parameters if "lora" not in name]
    assert names == ["base_model.model.model.embed_tokens.weight"]
    train(model, make_rows(4))
    base = model.module.get_base_model()
    assert base.lm_head.modules_to_save["default"].weight is base.model.embed_tokens.modules_to_save["default"].weight
    assert not torch.equal(base.lm_head.modules_to_save["default"].weight, base.lm_head.original_module.weight)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_lora_on_the_projection_itself(untied_llama, dropout):
    """Through the chunked head, against PEFT's own forward pass."""
    rows = make_rows(3)
    model = add(untied_llama, LoraAdapterConfig(r=4, target_modules=["q_proj", "lm_head"], dropout=dropout), logits_chunk=4)
    train(model, rows)
    assert "base_model.model.lm_head" in adapted(model)
    logps = model.forward_only(rows).result["logps"]
    for row, ours in zip(rows, logps):
        logits = model.module(input_ids=torch.tensor([row["input_ids"]])).logits[0]
        labels = torch.tensor(row["labels"])
        right = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[:, None]).squeeze(-1) * (labels >= 0)
        assert ours == pytest.approx(right.tolist(), abs=1e-5)
    with pytest.raises(ConfigError, match="dora=true is not supported on lm_head"):
        add(untied_llama, LoraAdapterConfig(target_modules=["lm_head"], dora=True))


@pytest.mark.parametrize("kind", KINDS)
def test_the_base_model_can_be_scored_beside_the_adapter(tiny_llama, kind):
    rows = make_rows(3)
    base = TransformersModel(tiny_llama).forward_only(rows).result["logps"]
    model = add(tiny_llama, KINDS[kind])
    train(model, rows)
    trained = model.forward_only(rows).result["logps"]
    assert trained != base
    assert model.forward_only(rows, disable_lora=True).result["logps"] == base
    assert model.forward_only(rows).result["logps"] == trained
    assert all(p.requires_grad for p in model.training_state().parameters.values())
    train(model, rows, 1)


def test_training_state_names(tiny_llama):
    model = add(tiny_llama, LoraAdapterConfig(r=2))
    configs = model.get_train_configs()
    assert configs.adapter["r"] == 2 and configs.adapter_name == "default" and configs.loss == "CrossEntropyLoss"
    assert configs.trainable_parameters == sum(p.numel() for p in model.training_state().parameters.values())
    assert model.get_state_dict().keys() == model.training_state().parameters.keys()
    with pytest.raises(UserError, match="no adapter 'other'; did you mean|no adapter 'other'; .*default"):
        model.count(make_rows(1)) and model.training_state("other")
    with pytest.raises(UserError, match="once"):
        model.add_adapter_to_model("second", LoraAdapterConfig())
    with pytest.raises(UserError, match="needs an adapter"):
        TransformersModel(tiny_llama).forward_only(make_rows(1), disable_lora=True)


def test_a_folder_that_is_no_lora(tiny_llama, tmp_path):
    with pytest.raises(CheckpointError, match="adapter_config.json is missing"):
        add(tiny_llama, str(tmp_path))


def test_s18_merged_weights_round_once(tiny_llama):
    """1.003 + 0.003 in float32, exported as bfloat16, is 1.0078125; rounding the base first would give 1.0."""
    model = add(tiny_llama, LoraAdapterConfig(r=1, alpha=1.0, target_modules=["q_proj"]))
    layer = model.module.get_base_model().model.layers[0].self_attn.q_proj
    with torch.no_grad():
        layer.base_layer.weight.fill_(1.003)
        layer.lora_A["default"].weight.fill_(0.003)
        layer.lora_B["default"].weight.fill_(1.0)
    merged = dict(model.named_weights())["model.layers.0.self_attn.q_proj.weight"]
    assert merged.to(torch.bfloat16).unique().tolist() == [1.0078125]


MIXTURES = {
    # The first layer is dense.
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [0]},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


@pytest.fixture(scope="module", params=MIXTURES)
def mixture(request, tmp_path_factory):
    import transformers

    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    config = getattr(transformers, f"{request.param}Config")(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, max_position_embeddings=64, **MIXTURES[request.param],
    )  # fmt: skip
    getattr(transformers, f"{request.param}ForCausalLM")(config).save_pretrained(folder)
    return folder


def test_all_linear_of_a_mixture_of_experts_is_its_attention(mixture, tmp_path):
    """PEFT would put a LoRA on the experts too, which neither a merge nor vLLM can read. Saved, it can be loaded again."""
    from transformers import AutoModelForCausalLM

    rows = make_rows(4)
    model = add(mixture, LoraAdapterConfig(r=4, dropout=0.1))
    expected = [f"base_model.model.model.layers.{i}.self_attn.{x}_proj" for i in range(2) for x in "koqv"]
    assert adapted(model) == expected
    train(model, rows)
    after = model.forward_only(rows).result["logps"]
    folder = f"{model.save('x', output_dir=str(tmp_path)).checkpoint_dir}/adapter"
    again = TransformersModel(mixture)
    again.add_adapter_to_model("default", folder)
    assert adapted(again) == expected and again.forward_only(rows).result["logps"] == after
    reloaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.float32), folder)
    theirs = get_peft_model_state_dict(reloaded)
    assert theirs.keys() == model.training_state().parameters.keys()
    plain = TransformersModel(mixture)
    merged = dict(model.named_weights())
    with torch.no_grad():
        for name, parameter in plain.module.named_parameters():
            parameter.copy_(merged[name])
    for mine, right in zip(plain.forward_only(rows).result["logps"], after):
        assert mine == pytest.approx(right, abs=1e-4)


def test_targets_in_a_mixture_of_experts(mixture):
    part = add(mixture, LoraConfig(r=4, target_modules=r".*layers\.1\..*[qv]_proj"))
    assert adapted(part) == [f"base_model.model.model.layers.1.self_attn.{x}_proj" for x in "qv"]
    both = MultiLoraTransformersModel(mixture)
    for name in ("one", "two"):  # the second finds layers that have a LoRA
        both.add_adapter_to_model(name, LoraConfig(r=4, target_modules="all-linear"))
        assert len(both.training_state(name).parameters) == 16
    own = "w1" if "Mixtral" in str(mixture) else "down_proj"
    for wrong in (["q_proj", own], ["gate"]):
        with pytest.raises(ConfigError, match=rf"target_modules names {wrong[-1]}, by which PEFT means experts or their router"):
            add(mixture, LoraConfig(target_modules=wrong))
    with pytest.raises(ConfigError, match=r"target_modules names model.layers.\d.mlp.experts, a .*Experts"):
        add(mixture, LoraConfig(target_modules=["experts"]))
    assert linear_module_names(mixture) == ("k_proj", "o_proj", "q_proj", "v_proj")  # what the run plan counts
