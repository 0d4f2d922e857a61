"""Tiny random models and rows of ids: no downloads, no tokenizer."""

import random
from pathlib import Path

import pytest
import torch

VOCABULARY = 97


def make_rows(count: int, *, seed: int = 0, low: int = 4, high: int = 14, masked: float = 0.4, vocabulary: int = VOCABULARY):
    """Features of uneven length with pre-shifted labels; the last position never has one."""
    rng = random.Random(seed)
    rows = []
    for i in range(count):
        length = rng.randint(low, high)
        ids = [rng.randrange(vocabulary) for _ in range(length)]
        labels = [ids[t + 1] if t + 1 < length and rng.random() >= masked else -100 for t in range(length)]
        if length > 1:
            labels[0] = ids[1]
        rows.append({"input_ids": ids, "labels": labels, "length": length, "sample_index": i, "row": f"rows.jsonl:{i + 1}"})
    return rows


def relative_distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Relative L2 distance of two sets of tensors."""
    assert a.keys() == b.keys() and a
    difference = sum((a[k].double() - b[k].double()).square().sum() for k in a)
    return float((difference / sum(a[k].double().square().sum() for k in a)).sqrt())


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory) -> Path:
    """Two layers, tied embeddings."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny_llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64, tie_word_embeddings=True, initializer_range=0.1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_gpt2(tmp_path_factory) -> Path:
    """For float64: unlike Llama it computes nothing in float32 on the way."""
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = tmp_path_factory.mktemp("tiny_gpt2")
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.1, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0,
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder
