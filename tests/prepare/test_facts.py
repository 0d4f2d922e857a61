"""Facts from config.json and safetensors headers, against the models themselves."""

import json
import struct
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import save_file
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from twinkle_research.errors import ConfigError
from twinkle_research.model.config import ArchitectureConfig
from twinkle_research.model.facts import linear_module_names, read_facts, tensor_shapes
from twinkle_research.model.prepare import prepare, smollm2, tiny, tiny_sums

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 64,
}  # fmt: skip
LINEAR = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def saved(model, folder, **options):
    model.save_pretrained(folder, **options)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    model = LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=True))
    return saved(model, tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shard_size", ["5GB", "20KB"])
def test_parameters_of_a_folder_single_and_sharded(tmp_path, tied, shard_size):
    model = LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=tied))
    facts = read_facts(saved(model, tmp_path, max_shard_size=shard_size))
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "20KB")
    assert facts.parameters == sum(p.numel() for p in model.parameters())
    assert facts.embedding_parameters == 64 * 32 * (1 if tied else 2)
    assert facts.tied_embeddings == tied
    assert set(facts.linear_modules) == LINEAR
    assert len(facts.linear_shapes) == 14  # 7 in each of 2 layers, no lm_head (S19)
    assert facts.weight_bytes == sum(f.stat().st_size for f in tmp_path.glob("*.safetensors"))
    assert (facts.num_heads, facts.num_kv_heads, facts.head_dim, facts.max_positions, facts.vocab_size) == (2, 1, 16, 64, 64)


def test_a_shipped_architecture_is_its_folder():
    assert replace(read_facts(prepare("tiny")), weight_bytes=0) == read_facts(tiny.ARCHITECTURE)


def test_qwen2_has_biases():
    config = Qwen2Config(**SMALL, tie_word_embeddings=False)
    model = Qwen2ForCausalLM(config)
    architecture = ArchitectureConfig(
        model_type="qwen2", vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=2, num_kv_heads=1,
        head_dim=16, max_positions=64, tied_embeddings=False,
    )  # fmt: skip
    assert tensor_shapes(architecture) == {name: tuple(p.shape) for name, p in model.state_dict().items()}
    assert read_facts(architecture).parameters == sum(p.numel() for p in model.parameters())


MIXTURES = [
    (MixtralForCausalLM, MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2), (4, 2, 48, False)),
    (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(
            **SMALL, head_dim=16, num_experts=4, num_experts_per_tok=3, moe_intermediate_size=24, mlp_only_layers=[1],
            decoder_sparse_step=1,
        ),
        (4, 3, 24, True),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "config", "expected"), MIXTURES, ids=["mixtral", "qwen3_moe"])
def test_mixtures_of_experts(tmp_path, kind, config, expected):
    model = kind(config)
    facts = read_facts(saved(model, tmp_path))
    found = facts.num_experts, facts.experts_per_token, facts.expert_intermediate_size, facts.has_dense_layers
    assert found == expected
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    assert facts.parameters == sum(p.numel() for p in model.parameters()) and facts.expert_parameters == experts > 0
    # all-linear means neither experts nor routers, nor what PEFT takes for experts: a dense layer's parts of the same name.
    linear = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and ".self_attn." in n]
    assert len(facts.linear_shapes) == len(linear)
    assert set(facts.linear_modules) == {name.rpartition(".")[2] for name in linear}


def test_a_dense_model_has_no_experts(llama):
    facts = read_facts(llama)
    assert (facts.num_experts, facts.expert_intermediate_size, facts.expert_parameters) == (0, 0, 0) and facts.has_dense_layers


def test_other_layouts(tmp_path):
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=40))
    facts = read_facts(saved(gpt2, tmp_path / "gpt2"))
    assert facts.parameters == sum(p.numel() for p in gpt2.parameters())
    assert (facts.hidden_size, facts.num_layers, facts.num_heads, facts.head_dim, facts.max_positions) == (32, 2, 2, 16, 40)
    assert facts.linear_modules == ("c_attn", "c_fc", "c_proj")
    assert facts.tied_embeddings
    gemma = Gemma3ForCausalLM(Gemma3TextConfig(**SMALL, head_dim=16))
    facts = read_facts(saved(gemma, tmp_path / "gemma"))
    assert facts.parameters == sum(p.numel() for p in gemma.parameters())


def test_the_language_model_of_a_multimodal_one(tmp_path):
    text = {
        **SMALL, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"], "tie_word_embeddings": False,
    }  # fmt: skip
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
    model = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=vision))
    facts = read_facts(saved(model, tmp_path))
    language = [p for n, p in model.named_parameters() if ".visual." not in n]
    assert facts.parameters == sum(p.numel() for p in language) < sum(p.numel() for p in model.parameters())
    assert (facts.hidden_size, facts.num_layers, facts.vocab_size) == (32, 2, 64)
    assert {"in_proj_qkv", "q_proj", "gate_proj"} <= set(facts.linear_modules)
    assert not {"lm_head", "qkv", "linear_fc1"} & set(facts.linear_modules)


def test_a_tied_head_that_is_also_on_disk_counts_once(tmp_path, llama):
    (tmp_path / "config.json").write_bytes((llama / "config.json").read_bytes())
    model = LlamaForCausalLM(LlamaConfig(**SMALL, tie_word_embeddings=True))
    save_file({k: v.clone() for k, v in model.state_dict().items()}, tmp_path / "model.safetensors")
    assert read_facts(tmp_path).parameters == read_facts(llama).parameters


def test_targets_s19(llama):
    facts = read_facts(llama)
    assert facts.unknown_modules(["q_proj", "v_porj"]) == ["v_porj"]
    assert facts.hint("v_porj") == "did you mean 'v_proj'?"
    assert facts.hint("all_linear") == "did you mean 'all-linear'?"
    good = ["all-linear", "lm_head", "embed_tokens", "model.layers.0.mlp.up_proj", "layers.1.self_attn.q_proj", "norm"]
    assert facts.unknown_modules(good) == []
    bad = ["proj", "_proj", "model.layers.2.mlp.up_proj", ""]
    assert facts.unknown_modules(bad) == bad
    assert set(linear_module_names(llama)) == LINEAR


# --- what is wrong is named -----------------------------------------------------------------------------------------


def write_header(path, header, data=b"", length=None):
    raw = json.dumps(header).encode() if isinstance(header, dict | list) else header
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)


def entry(shape=(2, 2), offsets=(0, 16)):
    return {"dtype": "F32", "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a safetensors file"),
        (b"\x01", "not a safetensors file"),
        (struct.pack("<Q", 2**60) + b"{}", "not a safetensors file, or cut short"),
        (struct.pack("<Q", 3) + b"{]}", "damaged safetensors header"),
        (struct.pack("<Q", 2) + b"[]", "not an object"),
        (struct.pack("<Q", 2) + b"\xff\xff", "damaged safetensors header"),
    ],
)
def test_files_that_are_not_safetensors(tmp_path, llama, content, message):
    (tmp_path / "config.json").write_bytes((llama / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_facts(tmp_path)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (entry(offsets=(0, 17)), "cut short: tensor 'w'"),
        (entry(shape=(-1, 2)), "damaged safetensors header at tensor 'w'"),
        (entry(shape=(1.5,)), "damaged"),
        (entry(offsets=(0,)), "damaged"),
        ({"dtype": "F32"}, "damaged"),
        ("x", "damaged"),
    ],
)
def test_damaged_headers(tmp_path, llama, tensor, message):
    (tmp_path / "config.json").write_bytes((llama / "config.json").read_bytes())
    write_header(tmp_path / "model.safetensors", {"w": tensor, "__metadata__": {"format": "pt"}}, bytes(16))
    with pytest.raises(ConfigError, match=message):
        read_facts(tmp_path)


OUTSIDE = ["../x.safetensors", "/etc/x.safetensors", "a/x.safetensors", "..", "", "a\\x.safetensors", "x.bin", 3, None]


@pytest.mark.parametrize("name", OUTSIDE)
def test_an_index_cannot_leave_the_folder_s34(tmp_path, llama, name):
    inside = tmp_path / "in"
    inside.mkdir()
    (inside / "config.json").write_bytes((llama / "config.json").read_bytes())
    write_header(tmp_path / "x.safetensors", {"w": entry()}, bytes(16))
    (inside / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(ConfigError, match="is not the name of a safetensors file in this folder"):
        read_facts(inside)


def test_what_is_missing_is_named(tmp_path, llama):
    with pytest.raises(ConfigError, match="config.json: not found"):
        read_facts(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        read_facts(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="expected a JSON object"):
        read_facts(tmp_path)
    (tmp_path / "config.json").write_bytes((llama / "config.json").read_bytes())
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ConfigError, match="no model.safetensors.*pytorch_model.bin is not read"):
        read_facts(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("{}")
    with pytest.raises(ConfigError, match="'weight_map' is missing"):
        read_facts(tmp_path)
    index.write_text(json.dumps({"weight_map": {"w": "model-00001-of-00001.safetensors"}}))
    with pytest.raises(ConfigError, match="named in the index but not there"):
        read_facts(tmp_path)


def test_an_unknown_architecture_is_refused():
    with pytest.raises(ConfigError, match="did you mean 'qwen3'"):
        tensor_shapes(ArchitectureConfig(model_type="qwen33"))


def test_facts_need_no_torch(llama):
    code = f"""
import sys
from dataclasses import asdict, replace
from twinkle_research.model.facts import read_facts
from twinkle_research.model.prepare import model_facts, resolve_model_folder
from twinkle_research.model.config import ModelConfig
read_facts({str(llama)!r}); model_facts(ModelConfig(name="hf", path={str(llama)!r}))
assert not {{"torch", "transformers", "numpy"}} & set(sys.modules), sorted(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert torch.__version__


@pytest.mark.parametrize(
    ("name", "architecture"),
    [("tiny", tiny.ARCHITECTURE), ("tiny_sums", tiny_sums.ARCHITECTURE), ("smollm2_135m", smollm2.ARCHITECTURE)],
)
def test_the_facts_in_conf_are_those_of_the_recipe(root, name, architecture):
    option = OmegaConf.load(root / "conf" / "model" / f"{name}.yaml")
    assert option.source == name
    assert ArchitectureConfig(**option.architecture) == architecture
