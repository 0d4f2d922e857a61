"""Every kind of rotary embedding that is accepted gives transformers' log-probabilities; the others are refused."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from twinkle_research.errors import ConfigError
from twinkle_research.model import MegatronModel, TransformersModel
from twinkle_research.model.megatron.architecture import Architecture
from twinkle_research.model.megatron.variants import ROTARY

KINDS = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "yarn, own factor": {"factor": 4.0, "original_max_position_embeddings": 32, "attention_factor": 0.8},
}


def folder(path, name, options):
    torch.manual_seed(0)
    rope = {"rope_type": name.split(",")[0], "rope_theta": 500.0, **options}
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, head_dim=32,
        num_key_value_heads=1, max_position_embeddings=128, initializer_range=0.2, rope_parameters=rope,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def test_all_kinds_are_here():
    assert {name.split(",")[0] for name in KINDS} == set(ROTARY)


@pytest.mark.parametrize("name", KINDS)
def test_same_logprobs(tmp_path, name):
    path = folder(tmp_path, name, KINDS[name])
    ids = np.random.default_rng(0).integers(0, 64, 90).tolist()
    row = {"input_ids": ids, "labels": [*ids[1:], -100]}
    expected = TransformersModel(path).forward_only([row]).result["logps"][0]
    model = MegatronModel(path)
    try:
        found = model.forward_only([row]).result["logps"][0]
    finally:
        model.close()
    assert np.abs(np.subtract(found, expected)).max() < 5e-6


def test_what_depends_on_the_length_is_refused(tmp_path):
    path = folder(tmp_path, "dynamic", {"factor": 4.0})
    with pytest.raises(ConfigError, match="of kind 'dynamic' are not supported by backend=megatron"):
        Architecture.read(path)
