"""Prompts, models and the definition of a log-probability for the sampler's tests."""

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from twinkle_research.sampler.filter import filter_logits

PROMPTS = [[5, 9, 30, 44], [7, 8], [100, 200, 300, 400, 500, 11, 12], [60], [5, 9, 30, 44, 61, 62]]


def small_qwen(vocab=16, positions=64, **settings):
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=16, max_position_embeddings=positions, eos_token_id=None, bos_token_id=None, pad_token_id=None, **settings,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval()


def tokens(responses):
    return [[s.tokens for s in r.sequences] for r in responses]


def logprobs_of(module, prompt, completion, params):
    """The definition: one forward pass over everything, then the filtered distribution."""
    with torch.no_grad():
        logits = module(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    filtered = filter_logits(logits, params.temperature, params.top_k, params.top_p).log_softmax(-1)
    return filtered[range(len(completion)), completion].tolist()
