"""The real model through a checkpoint and out of it again."""

import json

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from twinkle_research.checkpoint.config import CheckpointConfig
from twinkle_research.checkpoint.format import CheckpointReader
from twinkle_research.checkpoint.manager import CheckpointManager
from twinkle_research.checkpoint.merge import export
from twinkle_research.distributed.runtime import Runtime
from twinkle_research.model.config import LoraAdapterConfig
from twinkle_research.model.transformers import TransformersModel
from twinkle_research.trainer.rundir import RunFolder

IDS = torch.arange(10)[None]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, tie_word_embeddings=True
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def make_model(base, adapter, dtype="float32"):
    model = TransformersModel(base, dtype=dtype, seed=3)
    if adapter is not None:
        model.add_adapter_to_model("default", LoraAdapterConfig(**adapter))
    return model


ADAPTERS = {
    "full": None,
    "lora": {"r": 4},
    "rslora": {"r": 4, "rslora": True, "target_modules": ["q_proj", "down_proj"]},
    "dora": {"r": 4, "dora": True},
    "tied head": {"r": 4, "modules_to_save": ["lm_head"]},
    "tied embedding": {"r": 4, "modules_to_save": ["embed_tokens"]},
}


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("case", ADAPTERS)
def test_saved_loaded_and_exported(tmp_path, base, case, background):
    model = make_model(base, ADAPTERS[case])
    model.set_optimizer("AdamW", lr=0.05)
    row = {"input_ids": list(range(10)), "labels": list(range(1, 11)), "length": 10, "sample_index": 0, "row": "r"}
    for _ in range(3):
        model.forward_backward([row])
        model.clip_grad_and_step()
    checkpoints = CheckpointManager(RunFolder(tmp_path), CheckpointConfig(background=background), Runtime())
    path = checkpoints.save(3, model, {"step": 3})
    checkpoints.wait()
    reader = CheckpointReader(path)

    again = make_model(base, ADAPTERS[case])
    again.set_optimizer("AdamW", lr=0.05)
    again.load_state(reader, reader.json("trainer_state.json")["model"])
    trained, loaded = model.get_state_dict(), again.get_state_dict()
    assert trained.keys() == loaded.keys() and all(torch.equal(loaded[name], tensor) for name, tensor in trained.items())

    effective = dict(model.named_weights())
    exported = AutoModelForCausalLM.from_pretrained(export(tmp_path, tmp_path / "out"))
    assert (exported.lm_head.weight is exported.get_input_embeddings().weight) is exported.config.tie_word_embeddings is True
    for name, parameter in exported.named_parameters():
        assert torch.dist(parameter, effective[name]) <= 1e-6 * effective[name].norm(), name
    expected = model.module(input_ids=IDS).logits
    assert torch.dist(exported(IDS).logits, expected) <= 1e-5 * expected.norm()
    if ADAPTERS[case] is None:
        whole = AutoModelForCausalLM.from_pretrained(path / "model")
    else:
        whole = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), path / "adapter")
    assert torch.dist(whole(IDS).logits, expected) <= 1e-6 * expected.norm()


def test_optimizer_state_is_named_after_the_weights(tmp_path, base):
    model = make_model(base, {"r": 4})
    model.set_optimizer("AdamW", lr=0.05)
    model.forward_backward([{"input_ids": [1, 2, 3], "labels": [2, 3, 4], "length": 3, "sample_index": 0, "row": "r"}])
    model.clip_grad_and_step()
    path = CheckpointManager(RunFolder(tmp_path), CheckpointConfig(), Runtime()).save(1, model, {"step": 1})
    reader = CheckpointReader(path)
    names = set(reader.tensors("adapter"))
    assert set(reader.tensors("optimizer")) == {f"{name}.{slot}" for name in names for slot in ("exp_avg", "exp_avg_sq")}
    assert json.loads((path / "adapter" / "adapter_config.json").read_text())["peft_type"] == "LORA"
