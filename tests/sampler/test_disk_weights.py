"""What the engine is sent: the weights under the names, and in the shapes, that a Hugging Face folder has."""

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from twinkle_research.model.prepare import prepare
from twinkle_research.model.transformers import TransformersModel

MIXTURE = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24, "num_hidden_layers": 2,
    "head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "num_experts": 4, "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """transformers stacks the experts in memory."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("mixture")
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**MIXTURE)).save_pretrained(folder)
    return folder


def test_names_and_tensors_are_those_of_the_folder(mixture):
    for folder in (mixture, prepare("tiny")):
        sent = dict(TransformersModel(folder).disk_weights())
        stored = load_file(folder / "model.safetensors")
        stored.pop("lm_head.weight", None) if "lm_head.weight" not in sent else None  # tied: sent once
        assert sent.keys() == stored.keys()
        assert all(torch.equal(sent[name], tensor.float()) for name, tensor in stored.items())


def test_experts_are_split_one_layer_at_a_time(mixture):
    """Never more than one stacked tensor is held."""
    names = [name for name, _ in TransformersModel(mixture).disk_weights()]
    layers = [name.split(".")[2] for name in names if ".experts." in name]
    assert layers == sorted(layers) and len(layers) == 2 * 4 * 3


def test_an_adapter_is_merged(mixture):
    model = TransformersModel(mixture)
    model.add_adapter_to_model("default", LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    plain = dict(TransformersModel(mixture).disk_weights())
    assert all(torch.equal(tensor, plain[name]) for name, tensor in model.disk_weights())
    with torch.no_grad():
        for name, parameter in model.module.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)
    sent = dict(model.disk_weights())
    assert sent.keys() == plain.keys()
    changed = {name for name, tensor in sent.items() if not torch.equal(tensor, plain[name])}
    assert changed == {f"model.layers.{i}.self_attn.{p}_proj.weight" for i in (0, 1) for p in "qv"}
