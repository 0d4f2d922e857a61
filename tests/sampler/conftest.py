"""The tiny model and a sampler on it."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from twinkle_research.model.prepare import prepare
from twinkle_research.sampler.transformers import TransformersSampler
from twinkle_research.template import Template


@pytest.fixture(scope="module")
def template():
    return Template(prepare("tiny"))


@pytest.fixture(scope="module")
def module():
    """The tiny model with larger weights, so that its distributions are neither flat nor certain."""
    model = AutoModelForCausalLM.from_pretrained(prepare("tiny"))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(4)
    return model.eval()


@pytest.fixture
def sampler(module, template):
    return TransformersSampler(module, template)
