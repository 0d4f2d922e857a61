"""A sampler leaves the module as it found it: mode, adapter, gradients."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from sampling import PROMPTS, small_qwen, tokens

from twinkle_research.data_format import SamplingParams
from twinkle_research.errors import UserError
from twinkle_research.sampler.transformers import TransformersSampler


@pytest.fixture
def peft_model():
    """Two adapters that change the answers, dropout in the first, and one module that is frozen in eval mode."""
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], lora_dropout=0.5, init_lora_weights=False)
    model = get_peft_model(small_qwen(vocab=512), config, adapter_name="first")
    model.add_adapter("second", config)
    model.set_adapter("first")
    model.train()
    model.get_base_model().model.norm.eval()
    return model


def state_of(model):
    return [(n, m.training) for n, m in model.named_modules()], [(n, p.requires_grad) for n, p in model.named_parameters()]


def test_adapters_are_chosen_and_the_state_restored(peft_model):
    before, sampler = state_of(peft_model), TransformersSampler(peft_model)
    params = SamplingParams(temperature=0, max_tokens=12)
    active = tokens(sampler.sample(PROMPTS, params))
    assert tokens(sampler.sample(PROMPTS, params, "first")) == active
    second = tokens(sampler.sample(PROMPTS, params, "second"))
    base = tokens(sampler.sample(PROMPTS, params, use_base_model=True))
    assert active != second != base != active
    assert state_of(peft_model) == before
    assert peft_model.active_adapter == "first"
    plain = small_qwen(vocab=512)
    assert tokens(TransformersSampler(plain).sample(PROMPTS, params)) == base
    assert tokens(TransformersSampler(plain).sample(PROMPTS, params, use_base_model=True)) == base


def test_unknown_adapters_are_refused(peft_model, module):
    with pytest.raises(UserError, match="'secnd' is unknown; did you mean 'second'"):
        TransformersSampler(peft_model).sample([[1]], adapter_name="secnd")
    with pytest.raises(UserError, match="the model has no adapters"):
        TransformersSampler(module).sample([[1]], adapter_name="first")


def test_training_goes_on_after_sampling(peft_model):
    TransformersSampler(peft_model).sample(PROMPTS, SamplingParams(max_tokens=3, seed=0), "second")
    loss = peft_model(input_ids=torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss
    loss.backward()
    assert all((p.grad is not None) == ("first" in n) for n, p in peft_model.named_parameters() if "lora_" in n)
