"""Sampler and trainer on the same module in memory."""

import pytest
import torch
from peft import LoraConfig

from twinkle_research.data_format import IGNORE_INDEX, SamplingParams
from twinkle_research.model.prepare import prepare
from twinkle_research.model.transformers import TransformersModel
from twinkle_research.sampler.transformers import TransformersSampler
from twinkle_research.template import Template

PROMPTS = [
    {"messages": [{"role": "user", "content": text}]} for text in ("What is it?", "12+34", "Who knows the answer to that?")
]


def trained_model(sample_first: bool):
    """Three steps with dropout and checkpointing; the sampler runs between them or not."""
    model = TransformersModel(prepare("tiny"), gradient_checkpointing=True, seed=3)
    model.add_adapter_to_model("default", LoraConfig(r=4, lora_alpha=64, lora_dropout=0.2, target_modules="all-linear"))
    model.set_optimizer("AdamW", lr=1e-2)
    template = Template(prepare("tiny"))
    rows = [{"messages": [*prompt["messages"], {"role": "assistant", "content": "the answer"}]} for prompt in PROMPTS]
    features = template.batch_encode(rows)
    for _ in range(3):
        if sample_first:
            TransformersSampler(model.module, template).sample(PROMPTS, SamplingParams(max_tokens=5, seed=0))
        model.forward_backward(features)
        model.clip_grad_and_step()
    return model, template


@pytest.fixture(scope="module")
def trained():
    return trained_model(sample_first=True)


def test_sampling_between_steps_changes_nothing(trained):
    plain, _ = trained_model(sample_first=False)
    expected = plain.get_state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in trained[0].get_state_dict().items())


def test_trainer_and_sampler_agree_on_what_was_sampled(trained):
    model, template = trained
    params = SamplingParams(max_tokens=20, seed=1, num_samples=2, logprobs=1)
    sequences = [s for r in TransformersSampler(model.module, template).sample(PROMPTS, params) for s in r.sequences]
    scored = model.forward_only([s.new_input_feature for s in sequences]).result["logps"]
    for sequence, row in zip(sequences, scored, strict=True):
        labels = sequence.new_input_feature["labels"]
        values = [value for label, value in zip(labels, row, strict=True) if label != IGNORE_INDEX]
        assert values == pytest.approx([entry[0][1] for entry in sequence.logprobs], abs=1e-5)


def test_the_adapter_learns_what_it_was_shown():
    model, template = TransformersModel(prepare("tiny")), Template(prepare("tiny"))
    model.add_adapter_to_model("default", LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
    model.set_optimizer("AdamW", lr=5e-3)
    row = {"messages": [*PROMPTS[0]["messages"], {"role": "assistant", "content": "the answer"}]}
    for _ in range(30):
        model.forward_backward(template.batch_encode([row]))
        model.clip_grad_and_step()
    sampler = TransformersSampler(model.module, template)
    greedy = SamplingParams(temperature=0, max_tokens=10)
    sequence = sampler.sample(PROMPTS[:1], greedy)[0].sequences[0]
    assert (sequence.decoded, sequence.stop_reason) == ("the answer", "stop")
    assert sampler.sample(PROMPTS[:1], greedy, use_base_model=True)[0].sequences[0].decoded != "the answer"
