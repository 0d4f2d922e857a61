"""model=tiny: the same bits everywhere, a template that trains and samples the same text."""

import hashlib
import json

import numpy as np
import pytest
import torch
from jinja2 import TemplateError
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from twinkle_research.model.facts import read_facts
from twinkle_research.model.prepare import prepare, tiny
from twinkle_research.model.prepare.chat_template import CHAT_TEMPLATE
from twinkle_research.model.prepare.tiny import initial_values

# If one of these changes, tiny is another model: results of committed experiments no longer hold.
WEIGHTS_SHA256 = "d9b9e6222511a976f8bbfd6174a1b5c27b75c7db3aed15953c13fddbbef57bfc"
TOKENIZER_SHA256 = "ccd876a3c41bb66fd3628dacc7d93f4e419007b31e2d1c9f7c81eb6d9fc96819"
TEMPLATE_SHA256 = "2149732d80ec5b84ab67041eea7c4abd87569e8769808fe07dd8d0896031d28d"


@pytest.fixture(scope="module")
def folder():
    return prepare("tiny")


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_weights_are_pinned(folder):
    digest = hashlib.sha256()
    for name, tensor in sorted(load_file(folder / "model.safetensors").items()):
        digest.update(name.encode() + tensor.numpy().astype("<f4").tobytes())
    assert digest.hexdigest() == WEIGHTS_SHA256


def test_tokenizer_and_template_are_pinned(folder):
    model = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert sha256(json.dumps([model["model"]["vocab"], model["model"]["merges"]]).encode()) == TOKENIZER_SHA256
    assert sha256(settings["chat_template"].encode()) == TEMPLATE_SHA256
    assert settings["chat_template"] == CHAT_TEMPLATE


def test_initial_values_are_normal_enough_and_keyed():
    values = initial_values("a.weight", (400, 500)).ravel()
    assert abs(values.mean()) < 2e-4
    assert values.std() == pytest.approx(0.02, rel=0.01)
    assert abs(values).max() < 0.08
    assert np.array_equal(values, initial_values("a.weight", (500, 400)).ravel())
    assert not np.array_equal(values, initial_values("b.weight", (400, 500)).ravel())
    assert not np.array_equal(values, initial_values("a.weight", (400, 500), seed=1).ravel())
    assert (initial_values("x.input_layernorm.weight", (3,)) == 1).all()


def test_it_is_what_the_design_says(folder):
    model = AutoModelForCausalLM.from_pretrained(folder)
    facts = read_facts(folder)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert 600_000 <= facts.parameters <= 900_000
    assert facts.parameters == sum(p.numel() for p in model.parameters())
    assert (facts.num_layers, facts.head_dim, facts.max_positions) == (4, 32, 1024)
    assert model.dtype == torch.float32
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.generation_config.eos_token_id == 2


def test_bfloat16_is_the_rounded_float32(tmp_path, folder):
    half = load_file(prepare("tiny", tmp_path / "half", "bfloat16") / "model.safetensors")
    whole = load_file(folder / "model.safetensors")
    assert all(torch.equal(half[name], tensor.bfloat16()) for name, tensor in whole.items())


# --- tokenizer ------------------------------------------------------------------------------------------------------


def test_special_tokens_and_size(tokenizer):
    assert len(tokenizer) == tiny.ARCHITECTURE.vocab_size == 512
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]) == [0, 1, 2]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) == (0, 2, None)
    assert tokenizer.model_max_length == 1024


TEXTS = ["", " ", "Two  spaces\n\n\tand tabs", "é漢🙂\u2028\x00", "x" * 50, "<|im_end|>", "def f(): return 'a'"]


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_survives(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_digits_stand_alone_and_nothing_is_added(tokenizer):
    ids = tokenizer("12+345")["input_ids"]
    assert [tokenizer.decode([i]) for i in ids] == ["1", "2", "+", "3", "4", "5"]


def test_common_text_is_shorter_than_its_bytes(tokenizer):
    text = "What is the name of the capital? The teacher says that the answer is good."
    assert len(tokenizer(text)["input_ids"]) < 0.5 * len(text)


# --- chat template --------------------------------------------------------------------------------------------------

TOOLS = [{"type": "function", "function": {"name": "weather", "description": "é", "parameters": {"type": "object"}}}]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo", "days": 2}}}
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": None, "reasoning_content": "I need a tool.", "tool_calls": [CALL]},
    {"role": "tool", "content": "rain"},
    {"role": "assistant", "content": "It rains."},
]


def render(tokenizer, messages, **options):
    return tokenizer.apply_chat_template(messages, tokenize=False, **options)


def test_plain_conversation(tokenizer):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    assert render(tokenizer, messages) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
    prompt = render(tokenizer, messages[:1], add_generation_prompt=True)
    assert prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_tools_calls_and_thinking(tokenizer):
    text = render(tokenizer, CONVERSATION, tools=TOOLS)
    assert text.startswith("<|im_start|>system\nBe brief.\n\n")
    assert '{"type": "function", "function": {"name": "weather", "description": "é"' in text
    assert (
        "<|im_start|>assistant\n<think>\nI need a tool.\n</think>\n\n"
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call><|im_end|>\n'
        "<|im_start|>tool\nrain<|im_end|>\n<|im_start|>assistant\nIt rains.<|im_end|>\n"
    ) in text
    assert "None" not in text
    without = render(tokenizer, CONVERSATION, tools=TOOLS, enable_thinking=False)
    assert without == text.replace("<think>\nI need a tool.\n</think>\n\n", "")
    renamed = [{("thinking" if k == "reasoning_content" else k): v for k, v in m.items()} for m in CONVERSATION]
    assert render(tokenizer, renamed, tools=TOOLS) == text


def test_arguments_as_json_text_render_the_same(tokenizer):
    as_text = {"function": {"name": "weather", "arguments": '{"city": "Oslo", "days": 2}'}}
    messages = [*CONVERSATION[:2], {**CONVERSATION[2], "tool_calls": [as_text]}, *CONVERSATION[3:]]
    assert render(tokenizer, messages) == render(tokenizer, CONVERSATION)


def test_it_only_appends(tokenizer):
    whole = render(tokenizer, CONVERSATION, tools=TOOLS)
    for n in (2, 4):
        assert whole.startswith(render(tokenizer, CONVERSATION[:n], tools=TOOLS, add_generation_prompt=True))


def test_the_markers_cover_answers_and_their_end(tokenizer):
    encoded = tokenizer.apply_chat_template(CONVERSATION, tools=TOOLS, return_dict=True, return_assistant_tokens_mask=True)
    trained = tokenizer.decode([i for i, mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if mask])
    assert trained.count("<|im_end|>") == 2
    assert trained.startswith("<think>\nI need a tool.")
    assert trained.endswith("</tool_call><|im_end|>It rains.<|im_end|>")


def test_content_parts_and_later_system_messages(tokenizer):
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert render(tokenizer, parts) == "<|im_start|>user\nab<|im_end|>\n"
    later = [*parts, {"role": "system", "content": "s"}]
    assert render(tokenizer, later).endswith("<|im_start|>system\ns<|im_end|>\n")


def test_what_it_cannot_render_is_refused(tokenizer):
    with pytest.raises(TemplateError, match="content part of type 'image'"):
        render(tokenizer, [{"role": "user", "content": [{"type": "image"}]}])
    with pytest.raises(TemplateError, match="unknown role 'human'"):
        render(tokenizer, [{"role": "human", "content": "x"}])
