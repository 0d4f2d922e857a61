"""Export of adapters and models: exact, rounded once (case S18), loadable by transformers alone."""

import gc
import json
import shutil

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.models.qwen3_5 import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from twinkle_research.checkpoint.config import CheckpointConfig
from twinkle_research.checkpoint.format import CheckpointWriter, TensorSpec
from twinkle_research.checkpoint.manager import CheckpointManager
from twinkle_research.checkpoint.merge import export
from twinkle_research.checkpoint.stream import SafetensorsFile
from twinkle_research.distributed.runtime import Runtime
from twinkle_research.errors import CheckpointError
from twinkle_research.trainer.rundir import RunFolder

IDS = torch.arange(10)[None]


def make_base(folder, tied=False, dtype=torch.float32, kind="llama", bias=False):
    if kind == "gpt2":
        config = GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=1)
        model = GPT2LMHeadModel(config)
    else:
        config = LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, tie_word_embeddings=tied, attention_bias=bias,
        )  # fmt: skip
        model = LlamaForCausalLM(config)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.1 + float("norm" in name or "ln_" in name))
    model.to(dtype).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", chat_template="{{ messages }}").save_pretrained(folder)
    return folder


def make_adapter(base, folder, dtype=torch.float32, **settings):
    """A LoRA adapter with every trained tensor drawn at random; returns its unmerged logits."""
    settings = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", **settings}
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base, dtype=dtype), LoraConfig(**settings), autocast_adapter_dtype=False
    )
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "magnitude" not in name:
                parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.2)
            elif parameter.requires_grad:
                parameter.mul_(1 + 0.3 * torch.rand(parameter.shape, generator=draw))
    model.save_pretrained(folder)
    return model


def logits(folder, dtype):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)(IDS).logits


CASES = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "rsdora": {"use_dora": True, "use_rslora": True, "target_modules": ["q_proj", "down_proj"]},
    "rank and alpha patterns": {
        "rank_pattern": {"q_proj": 2, "layers.1.mlp.up_proj": 8}, "alpha_pattern": {r"layers\.\d+\.self_attn\.v_proj": 32},
    },
    "modules_to_save": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "embedding dora": {"target_modules": ["q_proj", "embed_tokens"], "use_dora": True},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "trained biases": {"bias": "lora_only"},
    "lora bias": {"lora_bias": True, "target_modules": ["q_proj", "v_proj"]},
    "some layers": {"target_modules": ["q_proj"], "layers_to_transform": [1]},
}  # fmt: skip


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-7), (torch.float64, 1e-15)], ids=["float32", "float64"])
@pytest.mark.parametrize("case", CASES)
def test_equals_peft(tmp_path, case, dtype, bound):
    bias = case in ("trained biases", "lora bias")
    base = make_base(tmp_path / "base", dtype=dtype, bias=bias)
    model = make_adapter(base, tmp_path / "adapter", dtype, **CASES[case])
    unmerged = model(IDS).logits
    out = export(tmp_path / "adapter", tmp_path / "out")
    expected = model.merge_and_unload().state_dict()
    ours = load_file(out / "model.safetensors")
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():
        assert ours[name].dtype == dtype
        assert (ours[name] - tensor).norm() <= bound * tensor.norm(), name
    assert torch.dist(logits(out, dtype), unmerged) <= 20 * bound * unmerged.norm()


TIED = {
    "lora": ({}, True),
    "modules_to_save embed": ({"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}, False),
    "modules_to_save head": ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, False),
    "modules_to_save both": ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]}, False),
    "both, kept tied": ({"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, True),
    "lora embed": ({"target_modules": ["q_proj", "embed_tokens"]}, False),
    "lora head": ({"target_modules": ["q_proj", "lm_head"]}, False),
}


@pytest.mark.parametrize("case", TIED)
def test_tied_embeddings_are_exact(tmp_path, case):
    """What the adapter was trained as is what the export computes; a pair of which one changed is untied."""
    settings, stays_tied = TIED[case]
    base = make_base(tmp_path / "base", tied=True)
    unmerged = make_adapter(base, tmp_path / "adapter", **settings)(IDS).logits
    out = export(tmp_path / "adapter", tmp_path / "out")
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is stays_tied
    assert ("lm_head.weight" in load_file(out / "model.safetensors")) is not stays_tied
    assert torch.dist(logits(out, torch.float32), unmerged) <= 1e-6 * unmerged.norm()


@pytest.mark.parametrize("dora", [False, True])
def test_transposed_weights(tmp_path, dora):
    """GPT-2 stores [in, out], and the files on the hub lack the prefix that the model's names have."""
    base = make_base(tmp_path / "base", kind="gpt2")
    model = make_adapter(
        base, tmp_path / "adapter", target_modules=["c_attn", "c_proj", "c_fc"], fan_in_fan_out=True, use_dora=dora
    )
    unmerged = model(IDS).logits
    weights = {name.removeprefix("transformer."): t.clone() for name, t in load_file(base / "model.safetensors").items()}
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    out = export(tmp_path / "adapter", tmp_path / "out")
    assert "h.0.attn.c_attn.weight" in load_file(out / "model.safetensors")
    assert torch.dist(logits(out, torch.float32), unmerged) <= 1e-6 * unmerged.norm()


def test_names_that_differ_between_files_and_model(tmp_path):
    """Qwen3.5's files hold a vision model too, and its text part under a prefix that the text model does not have."""
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 32,
        "num_position_embeddings": 16,
    }
    text = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16, "linear_num_value_heads": 2, "linear_num_key_heads": 2,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
    }  # fmt: skip
    Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=vision)).save_pretrained(tmp_path / "base")
    unmerged = make_adapter(tmp_path / "base", tmp_path / "adapter")(IDS).logits
    out = export(tmp_path / "adapter", tmp_path / "out")
    before, after = load_file(tmp_path / "base" / "model.safetensors"), load_file(out / "model.safetensors")
    assert after.keys() == before.keys() and "model.language_model.layers.0.mlp.up_proj.weight" in after
    assert all(torch.equal(after[n], t) for n, t in before.items() if "visual" in n)
    assert torch.dist(logits(out, torch.float32), unmerged) <= 1e-5 * unmerged.norm()


# --- S18 ------------------------------------------------------------------------------------------------------------


def make_s18(tmp_path):
    base = make_base(tmp_path / "base")
    weights = load_file(base / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj"
    weights[f"{name}.weight"] = torch.full((32, 32), 1.003)
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    make_adapter(base, tmp_path / "adapter", r=1, lora_alpha=1, target_modules=["q_proj"], layers_to_transform=[0])
    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    adapter[f"base_model.model.{name}.lora_A.weight"] = torch.full((1, 32), 0.003)
    adapter[f"base_model.model.{name}.lora_B.weight"] = torch.ones(32, 1)
    save_file(adapter, tmp_path / "adapter" / "adapter_model.safetensors", metadata={"format": "pt"})
    return f"{name}.weight", adapter


def test_s18_merges_in_float32_and_rounds_once(tmp_path):
    name, _ = make_s18(tmp_path)
    out = export(tmp_path / "adapter", tmp_path / "out", dtype="bfloat16")
    weights = load_file(out / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert set(weights[name].flatten().tolist()) == {1.0078125}
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained(out).dtype == torch.bfloat16


def test_s18_export_dtype_is_the_configured_one(tmp_path):
    """In a run folder the run's model.dtype decides; outside the base's own dtype."""
    name, adapter = make_s18(tmp_path)

    class Trained:
        backend = "transformers"
        layout = {"world_size": 1, "sharding": "none"}

        def save_state(self, writer, save_optimizer=True):
            specs = [TensorSpec.of(n, t) for n, t in adapter.items()]
            writer.add_tensors("adapter", specs, adapter.items(), stem="adapter_model", max_shard_bytes=None)
            writer.add_json("adapter/adapter_config.json", json.loads((tmp_path / "adapter" / "adapter_config.json").read_text()))
            return {}

    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    run.config.write_text("model:\n  dtype: bfloat16\n")
    CheckpointManager(run, CheckpointConfig(), Runtime()).save(3, Trained(), {"step": 3})
    assert load_file(export(run.path, tmp_path / "a") / "model.safetensors")[name].dtype == torch.bfloat16
    exact = load_file(export(run.path, tmp_path / "b", dtype="float32") / "model.safetensors")[name]
    assert exact.dtype == torch.float32 and torch.allclose(exact, torch.tensor(1.006), rtol=0, atol=1e-6)
    run.config.unlink()
    assert load_file(export(run.path, tmp_path / "c") / "model.safetensors")[name].dtype == torch.float32
    # A checkpoint's adapter folder is a PEFT folder as it stands.
    folder = run.checkpoints / "step-000003" / "adapter"
    peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), folder)
    assert torch.equal(
        peft.state_dict()[f"base_model.model.{name.removesuffix('.weight')}.lora_B.default.weight"], torch.ones(32, 1)
    )


# --- the folder -----------------------------------------------------------------------------------------------------


def test_folder_is_complete_and_sharded(tmp_path):
    base = make_base(tmp_path / "base")
    (base / "README.md").write_text("the base's card")
    (base / "pytorch_model.bin").write_bytes(b"never copied")
    unmerged = make_adapter(base, tmp_path / "adapter")(IDS).logits
    (tmp_path / "adapter" / "chat_template.jinja").write_text("{{ 'adapted' }}")
    out = export(tmp_path / "adapter", tmp_path / "deep" / "er" / "out", max_shard_bytes=20_000)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert torch.dist(logits(out, torch.float32), unmerged) <= 1e-6 * unmerged.norm()
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer("w3 w5")["input_ids"] == [3, 5] and tokenizer.chat_template == "{{ 'adapted' }}"
    names = {path.name for path in out.iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json"} <= names
    assert not {"README.md", "pytorch_model.bin", "adapter_config.json", "manifest.json"} & names


def test_links_of_the_hub_cache_are_followed(tmp_path):
    base = make_base(tmp_path / "blobs")
    (tmp_path / "snapshot").mkdir()
    for path in base.iterdir():
        (tmp_path / "snapshot" / path.name).symlink_to(path)
    make_adapter(base, tmp_path / "adapter")
    out = export(tmp_path / "adapter", tmp_path / "out", base=str(tmp_path / "snapshot"))
    assert not any(path.is_symlink() for path in out.iterdir())
    assert logits(out, torch.float32).isfinite().all()


def test_whole_models(tmp_path):
    base = make_base(tmp_path / "base")
    out = export(base, tmp_path / "out", dtype="bfloat16")
    before, after = load_file(base / "model.safetensors"), load_file(out / "model.safetensors")
    assert after.keys() == before.keys() and all(torch.equal(after[n], t.bfloat16()) for n, t in before.items())
    with CheckpointWriter(tmp_path / "c", "mine", step=1, backend="transformers") as writer:
        writer.add_tensors("model", [TensorSpec.of(n, t) for n, t in before.items()], before.items())
        writer.add_files("model", lambda path: [shutil.copy(p, path) for p in base.glob("*.json") if "index" not in p.name])
    out = export(tmp_path / "c" / "mine", tmp_path / "out2")
    after = load_file(out / "model.safetensors")
    assert all(torch.equal(after[n], t) for n, t in before.items())
    assert torch.equal(logits(out, torch.float32), logits(base, torch.float32))
    with pytest.raises(CheckpointError, match="holds a whole model: --base has no effect"):
        export(base, tmp_path / "out3", base="x")


def test_several_adapters(tmp_path):
    base = make_base(tmp_path / "base")
    models = {name: make_adapter(base, tmp_path / name, lora_alpha=alpha) for name, alpha in (("one", 2), ("two", 8))}
    with CheckpointWriter(tmp_path / "c", "mine", step=1, backend="transformers") as writer:
        for name in models:
            tensors = load_file(tmp_path / name / "adapter_model.safetensors")
            specs = [TensorSpec.of(n, t) for n, t in tensors.items()]
            writer.add_tensors(f"adapters/{name}", specs, tensors.items(), stem="adapter_model", max_shard_bytes=None)
            writer.add_json(
                f"adapters/{name}/adapter_config.json", json.loads((tmp_path / name / "adapter_config.json").read_text())
            )
    with pytest.raises(CheckpointError, match="holds several adapters, name one: one, two"):
        export(tmp_path / "c" / "mine", tmp_path / "out")
    with pytest.raises(CheckpointError, match="holds no adapter 'tow'; did you mean 'two'"):
        export(tmp_path / "c" / "mine", tmp_path / "out", adapter="tow")
    out = export(tmp_path / "c" / "mine", tmp_path / "out", adapter="two")
    expected = models["two"](IDS).logits
    assert torch.dist(logits(out, torch.float32), expected) <= 1e-6 * expected.norm()


# --- what is refused ------------------------------------------------------------------------------------------------

REFUSED = {
    "peft_type": ("VERA", "only LoRA adapters"),
    "init_lora_weights": ("pissa", "init_lora_weights='pissa' changed the base weights"),
    "target_parameters": (["mlp.experts"], "target_parameters"),
    "layer_replication": ([[0, 1]], "layer_replication"),
    "trainable_token_indices": ([1], "trainable_token_indices"),
    "a_setting_of_the_future": (True, "a_setting_of_the_future=True cannot be merged"),
    "lora_alpha": (None, "lora_alpha is missing"),
    "use_dora": (True, "does not fit use_dora=True"),
}


@pytest.fixture
def adapter(tmp_path):
    base = make_base(tmp_path / "base")
    make_adapter(base, tmp_path / "adapter", target_modules=["q_proj"])
    return tmp_path / "adapter"


def edit(path, **values):
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize("key", REFUSED)
def test_refused_by_name(adapter, tmp_path, key):
    value, message = REFUSED[key]
    edit(adapter / "adapter_config.json", **{key: value})
    with pytest.raises(CheckpointError, match=message):
        export(adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.tmp").exists()


def rename(adapter, old, new):
    path = adapter / "adapter_model.safetensors"
    save_file({name.replace(old, new): tensor.clone() for name, tensor in load_file(path).items()}, path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("layers.1.self_attn.q_proj", "layers.7.self_attn.q_proj", "no tensor for model.layers.7.self_attn.q_proj.weight"),
        ("lora_A.weight", "lora_E.weight", "lora_E.weight is of a kind that cannot be merged"),
        ("base_model.model.model", "model", "is of a kind that cannot be merged"),
        ("1.self_attn.q_proj.lora_A", "1.self_attn.k_proj.lora_A", "has only one of lora_A and lora_B"),
        ("self_attn.q_proj", "self_attn.k_proj", r"weight \[32, 32\], the base has \[16, 32\]"),
    ],
)
def test_tensors_that_do_not_fit_are_named(adapter, tmp_path, old, new, message):
    rename(adapter, old, new)
    with pytest.raises(CheckpointError, match=message):
        export(adapter, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_other_refusals(adapter, tmp_path):
    with pytest.raises(CheckpointError, match="dtype 'bf16' is not known; did you mean 'bfloat16'"):
        export(adapter, tmp_path / "out", dtype="bf16")
    with pytest.raises(CheckpointError, match="exists; choose a new folder"):
        export(adapter, adapter)
    with pytest.raises(CheckpointError, match="no such folder"):
        export(tmp_path / "none", tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="holds no finished checkpoint"):
        export(tmp_path / "empty", tmp_path / "out")
    with pytest.raises(CheckpointError, match="'/none/here' of .* is not there; name it with --base"):
        export(adapter, tmp_path / "out", base="/none/here")
    with pytest.raises(CheckpointError, match="'some/model' is neither a folder nor on the hub"):
        export(adapter, tmp_path / "out", base="some/model")
    edit(tmp_path / "base" / "config.json", quantization_config={"bits": 4})
    with pytest.raises(CheckpointError, match="is quantized"):
        export(adapter, tmp_path / "out")


def test_pickle_base_is_refused(adapter, tmp_path):
    (tmp_path / "base" / "model.safetensors").rename(tmp_path / "base" / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pytorch_model.bin' is refused"):
        export(adapter, tmp_path / "out")


def test_merging_holds_one_weight_at_a_time(tmp_path, monkeypatch):
    """Elements of all live tensors, counted whenever one is written: the base weight, its parts and its result."""
    make_adapter(make_base(tmp_path / "base"), tmp_path / "adapter")
    write, most = SafetensorsFile.write, []

    def counting(self, name, tensor):
        most.append(sum(t.numel() for t in gc.get_objects() if torch.is_tensor(t)))
        write(self, name, tensor)

    monkeypatch.setattr(SafetensorsFile, "write", counting)
    gc.collect()
    gc.freeze()  # what was there before is not looked at
    export(tmp_path / "adapter", tmp_path / "out")
    gc.unfreeze()
    assert len(most) > 15 and max(most) <= 4 * 64 * 32
