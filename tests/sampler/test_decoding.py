"""Decoding in place: the cache that grows in its buffers, rows that close up, attention in groups."""

import random

import pytest
import torch
from sampling import small_qwen
from torch.testing import assert_close
from transformers import DynamicCache, FalconConfig, FalconForCausalLM, MistralConfig, MistralForCausalLM, Qwen3Config

from twinkle_research.data_format import SamplingParams
from twinkle_research.sampler.attention import NAME, grouped_attention
from twinkle_research.sampler.cache import _ROOM, SlabCache
from twinkle_research.sampler.transformers import TransformersSampler, _closed_up

SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def test_rows_close_up_and_few_of_them_move():
    assert _closed_up([True, False, True, False, True, True]) == [0, 5, 2, 4]
    rng = random.Random(0)
    for _ in range(300):
        alive = [rng.random() < 0.7 for _ in range(rng.randrange(1, 12))]
        rows = _closed_up(alive)
        assert sorted(rows) == [i for i, going_on in enumerate(alive) if going_on]
        assert all(row == i or row >= len(rows) for i, row in enumerate(rows))


@pytest.mark.parametrize("sliding", [False, True])
def test_the_cache_holds_what_that_of_transformers_does(sliding):
    settings = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1} if sliding else {}
    config = Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=8, **settings)
    generator, rng = torch.Generator().manual_seed(0), random.Random(1)
    for _ in range(8):
        mine, theirs = SlabCache(config), DynamicCache(config=config)
        rows, length = rng.randrange(2, 7), rng.randrange(1, 9)
        for step in range(_ROOM + 30):
            new = torch.randn(2, 2, rows, 2, length if step == 0 else rng.choice([1, 1, 1, 3]), 8, generator=generator)
            for layer in range(2):
                got = mine.update(new[layer, 0], new[layer, 1], layer)
                expected = theirs.update(new[layer, 0], new[layer, 1], layer)
                assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
            assert mine.get_seq_length(0) == theirs.get_seq_length(0)
            assert mine.get_mask_sizes(1, 0) == theirs.get_mask_sizes(1, 0)
            if step == 0 or rng.random() < 0.03:  # repeated and in another order
                index = torch.tensor([rng.randrange(rows) for _ in range(rng.randrange(2, 9))])
                mine.reorder_cache(index)
                theirs.reorder_cache(index)
                rows = len(index)
            elif rows > 1 and rng.random() < 0.03:
                order = _closed_up([i != dropped for dropped in [rng.randrange(rows)] for i in range(rows)])
                mine.close_up(order, torch.tensor(order))
                theirs.reorder_cache(torch.tensor(order))
                rows = len(order)


def test_prompts_given_to_the_cache_are_not_written_to():
    cache = SlabCache(Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=8))
    keys = torch.zeros(2, 2, 3, 8)
    cache.update(keys, keys, 0)
    cache.update(torch.ones(2, 2, 1, 8), torch.ones(2, 2, 1, 8), 0)
    assert not keys.any()


def test_long_uneven_completions_are_those_of_generate():
    """Longer than the first buffers, rows that end at different times, prompts of different length, shared heads."""
    model = small_qwen(vocab=24, positions=256)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(4)
    model.generation_config.eos_token_id = 3
    prompts = [[5, 9, 7], [7, 8, 9, 10, 11, 12, 13], [6], [1, 2], [4, 4, 4, 4], [20, 21]]
    got = TransformersSampler(model).sample(prompts, SamplingParams(temperature=0, max_tokens=_ROOM * 2 + 20))
    lengths = set()
    for prompt, response in zip(prompts, got, strict=True):
        expected = model.generate(
            torch.tensor([prompt]), max_new_tokens=_ROOM * 2 + 20, do_sample=False, pad_token_id=0, eos_token_id=3
        )
        assert response.sequences[0].tokens == expected[0, len(prompt) :].tolist()
        lengths.add(len(response.sequences[0].tokens))
    assert len(lengths) > 2 and max(lengths) == _ROOM * 2 + 20


@pytest.mark.parametrize("shared", [1, 2, 4])
def test_attention_in_groups_is_attention(shared):
    torch.manual_seed(0)
    config = MistralConfig(**SMALL, intermediate_size=48, num_key_value_heads=shared, head_dim=8, sliding_window=None)
    model = MistralForCausalLM(config).eval()
    ids, padded = torch.randint(1, 64, (3, 9)), torch.ones(3, 9, dtype=torch.long)
    padded[0, :4] = 0
    for mask in (padded, torch.ones_like(padded)):
        expected = last_logits(model, ids, mask)
        with grouped_attention(model):
            assert config._attn_implementation == NAME
            assert_close(last_logits(model, ids, mask), expected, atol=2e-6, rtol=0)
        assert config._attn_implementation == "sdpa"


def last_logits(model, ids, mask):
    """Of the last token, after the others were read into a cache."""
    positions, cache = (mask.cumsum(-1) - 1).clamp(min=0), DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :8], attention_mask=mask[:, :8], position_ids=positions[:, :8], past_key_values=cache)
        return model(ids[:, 8:], attention_mask=mask, position_ids=positions[:, 8:], past_key_values=cache).logits


def test_models_that_choose_their_attention_themselves_are_left_alone():
    model = FalconForCausalLM(FalconConfig(**SMALL, num_kv_heads=2, new_decoder_architecture=True)).eval()
    with grouped_attention(model):
        assert model.config._attn_implementation == "sdpa"
    eager = small_qwen()
    eager.set_attn_implementation("eager")
    with grouped_attention(eager):
        assert eager.config._attn_implementation == "eager"
