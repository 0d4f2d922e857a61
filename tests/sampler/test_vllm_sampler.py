"""Sampling by a vLLM engine in this process: the same answers as from the model itself (S12, S13, S14)."""

import gc
import math
import os
import random
from dataclasses import asdict

import numpy as np
import pytest
import torch
from engines import answers, needs_vllm, sharp_model, values
from sampling import PROMPTS, logprobs_of, tokens

from twinkle_research.data_format import IGNORE_INDEX, SamplingParams
from twinkle_research.errors import DataError, UserError
from twinkle_research.model.prepare import prepare
from twinkle_research.sampler.base import NonFiniteLogits
from twinkle_research.sampler.engine import EngineOptions
from twinkle_research.sampler.transformers import TransformersSampler
from twinkle_research.sampler.vllm import VLLMSampler

pytestmark = needs_vllm
LONG = [(7 * i) % 500 + 5 for i in range(100)]


@pytest.fixture(scope="module")
def model():
    return sharp_model()


@pytest.fixture(scope="module")
def sampler(model, template):
    made = VLLMSampler(prepare("tiny"), template, options=EngineOptions(max_model_len=160))
    made.sync(model, 0)
    yield made
    made.close()


@pytest.fixture
def plain(model, template):
    return TransformersSampler(model.module, template)


# --- what is drawn --------------------------------------------------------------------------------------------------

SETTINGS = [
    {"temperature": 0.6},
    {"temperature": 1.0},
    {"temperature": 1.3},
    {"top_p": 0.9},
    {"top_k": 20},
    {"temperature": 0.7, "top_k": 9, "top_p": 0.8, "logprobs": 5},
    {"temperature": 0.0},
    {"repetition_penalty": 1.3},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_answers_are_those_of_the_transformers_sampler(model, sampler, plain, settings):
    params = SamplingParams(**{"max_tokens": 24, "seed": 3, "logprobs": 1, "num_samples": 3} | settings)
    prompts = [*PROMPTS, LONG]
    got, expected = sampler.sample(prompts, params, step=2), plain.sample(prompts, params, step=2)
    assert answers(got) == answers(expected)
    assert values(got) == pytest.approx(values(expected), abs=2e-5)
    if params.repetition_penalty == 1:
        for prompt, response in zip(prompts, got, strict=True):
            for sequence in response.sequences:
                own = [entries[0][1] for entries in sequence.logprobs]
                assert own == pytest.approx(logprobs_of(model.module, prompt, sequence.tokens, params), abs=2e-5)


def test_greedy_logprobs_are_untempered_and_finite_s12(model, sampler):
    (response,) = sampler.sample([PROMPTS[0]], SamplingParams(temperature=0, max_tokens=10, logprobs=1))
    got = [entries[0][1] for entries in response.sequences[0].logprobs]
    assert all(map(math.isfinite, got)) and response.sequences[0].kept is None
    assert got == pytest.approx(logprobs_of(model.module, PROMPTS[0], response.sequences[0].tokens, SamplingParams()), abs=2e-5)


def test_a_completion_depends_on_its_key_only(sampler):
    params = SamplingParams(max_tokens=16, seed=5, num_samples=2)
    prompts = [*PROMPTS, LONG]
    whole = tokens(sampler.sample(prompts, params, step=3))
    assert tokens(sampler.sample(prompts[::-1], params, step=3, prompt_indices=range(5, -1, -1))) == whole[::-1]
    assert [tokens(sampler.sample([p], params, step=3, prompt_indices=[i]))[0] for i, p in enumerate(prompts)] == whole
    for other in ({"step": 4}, {"step": 3, "purpose": "evaluation"}):
        assert all(a != b for a, b in zip(tokens(sampler.sample(prompts, params, **other)), whole, strict=True))


def test_seeds_s13(model, sampler):
    """Equal logits: completions differ, a repeat does not, nor does the request change; without a seed all is new."""
    params = SamplingParams(max_tokens=8, num_samples=4, seed=7)
    before = asdict(params)
    first, again = (tokens(sampler.sample([PROMPTS[0]], params))[0] for _ in range(2))
    assert first == again and asdict(params) == before
    assert len({tuple(t) for t in first}) == 4
    two_workers = [tokens(sampler.sample([PROMPTS[0]], params, prompt_indices=[i]))[0] for i in (0, 1)]
    assert two_workers[0] != two_workers[1]
    unseeded = [tokens(sampler.sample([PROMPTS[0]], SamplingParams(max_tokens=8)))[0] for _ in range(2)]
    assert unseeded[0] != unseeded[1]


def test_a_completion_that_is_put_back_goes_on_as_it_began(model, template, sampler, monkeypatch):
    """A cache for little more than one context: completions lose their place in it and are computed again."""
    tight = VLLMSampler(prepare("tiny"), template, options=EngineOptions(max_model_len=160, kv_cache_gib=7 * 32 * 2048 / 2**30))
    tight.sync(model, 0)
    params = SamplingParams(max_tokens=40, seed=1, num_samples=3, logprobs=1, top_p=0.95)
    prompts = [LONG[i:] for i in range(0, 40, 8)]
    scheduler, put_back = tight.engine.core.engine_core.scheduler, []
    preempt = scheduler._preempt_request
    monkeypatch.setattr(scheduler, "_preempt_request", lambda *a, **k: put_back.append(a) or preempt(*a, **k))
    got, expected = tight.sample(prompts, params), sampler.sample(prompts, params)
    assert put_back
    assert answers(got) == answers(expected)
    assert values(got) == pytest.approx(values(expected), abs=2e-5)
    tight.close()


def test_a_prompt_that_is_computed_in_pieces_is_drawn_for_once(sampler, plain, monkeypatch):
    """A step takes 4,096 tokens of prompts. What the piece of a prompt gives is thrown away."""
    drawn = []
    forward = sampler.engine.keyed.forward
    monkeypatch.setattr(sampler.engine.keyed, "forward", lambda logits, *a: drawn.append(len(logits)) or forward(logits, *a))
    prompts = [[(7 * i + j) % 500 + 5 for j in range(150)] for i in range(30)]
    params = SamplingParams(max_tokens=3, seed=2, top_p=0.9)
    assert answers(sampler.sample(prompts, params)) == answers(plain.sample(prompts, params))
    assert sum(drawn) > 30 * 3


def test_ties_are_kept_as_they_are_drawn_from(template):
    flat = sharp_model()
    with torch.no_grad():
        flat.module.get_input_embeddings().weight.zero_()  # also the output projection: all logits are 0
    sampler = VLLMSampler(prepare("tiny"), template, options=EngineOptions(max_model_len=64))
    sampler.sync(flat, 0)
    for settings, smallest in (({"top_k": 5}, 512), ({"top_p": 0.5}, 256), ({"top_k": 5, "top_p": 0.25}, 128)):
        params = SamplingParams(max_tokens=4, seed=1, logprobs=1, num_samples=2, **settings)
        (response,) = sampler.sample([[5]], params)
        for sequence in response.sequences:
            for token, kept, entries in zip(sequence.tokens, sequence.kept, sequence.logprobs, strict=True):
                assert token in kept and kept == sorted(set(kept)) and smallest <= len(kept) <= smallest + 1
                assert entries[0][1] == pytest.approx(-math.log(len(kept)), abs=1e-5)
    sampler.close()


def test_a_group_shares_its_prefill(sampler, monkeypatch):
    scheduled = []
    execute = sampler.engine.runner.execute_model
    monkeypatch.setattr(
        sampler.engine.runner, "execute_model",
        lambda output, *a, **k: scheduled.append(output.total_num_scheduled_tokens) or execute(output, *a, **k),
    )  # fmt: skip
    sampler.engine.reset_prefix_cache()
    sampler.sample([LONG], SamplingParams(max_tokens=1, seed=0, num_samples=8))
    assert sum(scheduled) == 100 + 7 * 4  # 96 = 3 blocks of 32 are shared


# --- where it ends --------------------------------------------------------------------------------------------------


def test_stop_strings_and_ids_s14a(sampler, plain):
    params = SamplingParams(max_tokens=30, seed=3, num_samples=4, logprobs=1)
    free = sampler.sample(PROMPTS, params)
    decoded = [s.decoded for r in free for s in r.sequences]
    text = max((t[i : i + 2] for t in decoded for i in range(4, len(t) - 2) if t[i : i + 2].isascii()), key=decoded[0].count)
    for stop in ([text], [free[0].sequences[0].tokens[3]], ["<|im_end|>", text]):
        wanted = SamplingParams(**{**asdict(params), "stop": stop})
        got = sampler.sample(PROMPTS, wanted)
        assert answers(got) == answers(plain.sample(PROMPTS, wanted))
        stopped = [s for r in got for s in r.sequences if s.stop_reason == "stop"]
        assert stopped and all(len(s.logprobs) == len(s.tokens) for s in stopped)
        if text in stop:
            assert all(text not in s.decoded for s in stopped)


def test_a_prompt_that_fills_the_context_s14b(sampler):
    full = [(11 * i) % 500 + 5 for i in range(160)]
    params = SamplingParams(max_tokens=5, seed=1, logprobs=1, num_samples=2, top_k=8)
    responses = sampler.sample([full, PROMPTS[0], full[:-2]], params)
    for sequence in responses[0].sequences:
        assert (sequence.tokens, sequence.logprobs, sequence.kept, sequence.decoded) == ([], [], [], "")
        assert sequence.stop_reason == "length" and set(sequence.new_input_feature["labels"]) == {IGNORE_INDEX}
    assert [len(s.tokens) for s in responses[1].sequences] == [5, 5]
    assert [len(s.tokens) for s in responses[2].sequences] == [2, 2]
    with pytest.raises(DataError, match="prompt 0 has 161 tokens, the model reads at most 160"):
        sampler.sample([[*full, 5]], params)
    assert sampler.sample([], params) == []


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_prompt_logprobs(sampler, plain, max_tokens):
    full = [(11 * i) % 500 + 5 for i in range(160)]
    params = SamplingParams(max_tokens=max_tokens, temperature=0.5, prompt_logprobs=3, seed=1, num_samples=2)
    for prompt in (*PROMPTS, full):
        (got,), (expected,) = sampler.sample([prompt], params), plain.sample([prompt], params)
        assert got.prompt_logprobs[0] is None and got.topk_prompt_logprobs[0] is None
        assert got.prompt_logprobs[1:] == pytest.approx(expected.prompt_logprobs[1:], abs=2e-5)
        top = [[[t for t, _ in entries] for entries in r.topk_prompt_logprobs[1:]] for r in (got, expected)]
        assert top[0] == top[1]
    (alone,) = sampler.sample([[5]], params)
    assert alone.prompt_logprobs == [None]


def test_a_stream_gives_the_text_of_the_sample(sampler):
    params = SamplingParams(max_tokens=20, seed=4, stop=["zq"])
    chunks = list(sampler.sample_stream(PROMPTS[0], params))
    (whole,) = sampler.sample([PROMPTS[0]], params)
    assert "".join(chunk.delta for chunk in chunks) == whole.sequences[0].decoded
    assert [c.finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == whole.sequences[0].stop_reason


# --- what goes wrong ------------------------------------------------------------------------------------------------


def test_nan_names_the_prompt(model, sampler):
    with sampler.engine.model_in_place() as module:
        module.model.embed_tokens.weight[300] = math.nan  # also the output projection
    try:
        for params in (SamplingParams(max_tokens=3, seed=1), SamplingParams(max_tokens=3, temperature=0)):
            with pytest.raises(NonFiniteLogits, match="prompt 8: the model gives NaN"):
                sampler.sample([[5], [6]], params, prompt_indices=[8, 9])
        with pytest.raises(NonFiniteLogits, match="prompt 0: the model gives NaN or infinite logits within"):
            sampler.sample([[5, 6]], SamplingParams(max_tokens=0, prompt_logprobs=0))
    finally:
        sampler.sync(model, 0)
    assert tokens(sampler.sample([[5]], SamplingParams(max_tokens=3, seed=1)))


def test_weights_are_laid_out_anew_when_they_were_written_to(model, sampler):
    layers = [layer for layer in sampler.engine.model.modules() if "cpu_linear" in vars(layer)]
    assert layers and all(layer.weight.numel() for layer in layers), "the originals stay"
    params = SamplingParams(max_tokens=1, seed=1)
    sampler.sample([[5]], params)
    packed = [layer.cpu_linear for layer in layers]
    sampler.sample([[6]], params)
    assert [layer.cpu_linear for layer in layers] == packed
    sampler.sync(model, 0)
    sampler.sample([[5]], params)
    assert not any(layer.cpu_linear in packed for layer in layers)


def test_an_interrupted_call_leaves_nothing_behind(sampler, monkeypatch):
    params = SamplingParams(max_tokens=12, seed=2, num_samples=2)
    expected = tokens(sampler.sample(PROMPTS, params))
    forward, calls = sampler.engine.keyed.forward, []

    def interrupted(*args):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return forward(*args)

    monkeypatch.setattr(sampler.engine.keyed, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sampler.sample(PROMPTS, params)
    monkeypatch.undo()
    assert tokens(sampler.sample(PROMPTS, params)) == expected
    stream = sampler.sample_stream(PROMPTS[0], params)
    next(stream)
    with pytest.raises(UserError, match="the engine is busy"):
        sampler.sample(PROMPTS, params)
    stream.close()  # given up in the middle
    assert tokens(sampler.sample(PROMPTS, params)) == expected
    assert sampler.engine.reset_prefix_cache()


def _cached_blocks(sampler):
    return sampler.engine.core.engine_core.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block


@pytest.mark.parametrize("level", [0, 1, 2])
def test_nothing_is_sampled_asleep_or_without_weights(model, template, level):
    sampler = VLLMSampler(prepare("tiny"), template, options=EngineOptions(max_model_len=64, sleep_level=level))
    params = SamplingParams(max_tokens=4, seed=1)
    with pytest.raises(UserError, match="no weights"):
        sampler.sample([[5]], params)
    sampler.sync(model, 3)
    expected = tokens(sampler.sample([[5]], params))
    sampler.sample([LONG[:40]], params)
    assert len(_cached_blocks(sampler)) == 1
    sampler.sleep()
    sampler.sleep()
    assert not _cached_blocks(sampler)
    with pytest.raises(UserError, match="no weights" if level == 2 else "asleep"):
        sampler.sample([[5]], params)
    sampler.wake_up()
    sampler.wake_up()
    if level == 2:
        assert sampler.version == -1
        with pytest.raises(UserError, match="no weights"):
            sampler.sample([[5]], params)
        sampler.sync(model, 3)
    assert sampler.version == 3
    assert tokens(sampler.sample([[5]], params)) == expected
    sampler.sleep()
    sampler.sync(model, 4)  # wakes it
    assert tokens(sampler.sample([[5]], params)) == expected
    sampler.close()
    sampler.close()
    with pytest.raises(UserError, match="closed"):
        sampler.sample([[5]], params)


# --- what it leaves alone -------------------------------------------------------------------------------------------


def _state():
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 (the one to be protected)
    return {
        "python": python, "numpy": (numpy[0], numpy[1].tolist(), *numpy[2:]), "torch": torch.get_rng_state().tolist(),
        "environment": dict(os.environ), "set_num_threads": torch.set_num_threads, "threads": torch.get_num_threads(),
        "precision": torch.get_float32_matmul_precision(), "frozen": gc.get_freeze_count(), "collecting": gc.isenabled(),
        "default": torch.get_default_dtype(), "grad": torch.is_grad_enabled(),
    }  # fmt: skip


def test_the_process_stays_as_it_was(model, template, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    before = _state()
    sampler = VLLMSampler(prepare("tiny"), template, options=EngineOptions(max_model_len=64))
    assert _state() == before
    sampler.sync(model, 0)
    sampler.sample(PROMPTS, SamplingParams(max_tokens=4, top_p=0.9))
    sampler.sample(PROMPTS, SamplingParams(max_tokens=4, temperature=0))
    assert _state() == before
    sampler.close()
    assert _state() == before


def test_engines_come_and_go(model, sampler, template):
    """Closing one does not take the process groups that another works with."""
    params = SamplingParams(max_tokens=6, seed=1)
    expected = tokens(sampler.sample(PROMPTS, params))
    second = VLLMSampler(prepare("tiny"), template, options=EngineOptions(max_model_len=64))
    second.sync(model, 0)
    assert tokens(second.sample(PROMPTS, params)) == expected
    second.close()
    assert tokens(sampler.sample(PROMPTS, params)) == expected
