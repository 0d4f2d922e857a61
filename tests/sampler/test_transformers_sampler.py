"""Sampling from a model in memory (S06c, S12, S13, S14)."""

import copy
import math
from dataclasses import asdict

import pytest
import torch
from sampling import PROMPTS, logprobs_of, small_qwen, tokens
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

from twinkle_research.data_format import IGNORE_INDEX, SamplingParams
from twinkle_research.errors import DataError, UserError
from twinkle_research.sampler import transformers as sampler_module
from twinkle_research.sampler.base import NonFiniteLogits
from twinkle_research.sampler.filter import filter_logits
from twinkle_research.sampler.transformers import TransformersSampler

# --- against transformers -------------------------------------------------------------------------------------------

BASE = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
GROUPED = {**BASE, "intermediate_size": 48, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64}
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
}  # fmt: skip
ARCHITECTURES = {
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=64)),
    "sliding window": lambda: MistralForCausalLM(MistralConfig(**GROUPED, sliding_window=6)),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**GROUPED, sliding_window=6, final_logit_softcapping=5.0)),
    "linear attention": lambda: Qwen3_5ForCausalLM(Qwen3_5TextConfig(**GROUPED, **LINEAR)),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_padded_batch_gives_what_generate_gives_alone(name):
    torch.manual_seed(1)
    model = ARCHITECTURES[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(5)
    model.generation_config.eos_token_id = 3
    prompts = [[5, 9, 30], [7, 8, 9, 10, 11, 12, 13, 14, 15, 16], [60], [1, 2]]
    got = TransformersSampler(model).sample(prompts, SamplingParams(temperature=0, max_tokens=20))
    for prompt, response in zip(prompts, got, strict=True):
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False, pad_token_id=0, eos_token_id=3)
        assert response.sequences[0].tokens == expected[0, len(prompt) :].tolist()


def test_repetition_penalty_is_that_of_generate(module, sampler):
    got = sampler.sample(PROMPTS, SamplingParams(temperature=0, max_tokens=25, repetition_penalty=1.3))
    plain = sampler.sample(PROMPTS, SamplingParams(temperature=0, max_tokens=25))
    assert tokens(got) != tokens(plain)
    for prompt, response in zip(PROMPTS, got, strict=True):
        expected = module.generate(torch.tensor([prompt]), max_new_tokens=25, do_sample=False, repetition_penalty=1.3)
        assert response.sequences[0].tokens == expected[0, len(prompt) :].tolist()


# --- log-probabilities ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.6},
        {"temperature": 1.0},
        {"temperature": 1.3},
        {"top_p": 0.9},
        {"top_k": 20},
        {"temperature": 0.7, "top_k": 9, "top_p": 0.8},
    ],
)
def test_logprobs_are_those_of_the_distribution_sampled_from(module, sampler, settings):
    params = SamplingParams(max_tokens=24, seed=3, logprobs=1, num_samples=3, **settings)
    for prompt, response in zip(PROMPTS, sampler.sample(PROMPTS, params), strict=True):
        for sequence in response.sequences:
            assert [entry[0][0] for entry in sequence.logprobs] == sequence.tokens
            got = [entry[0][1] for entry in sequence.logprobs]
            assert got == pytest.approx(logprobs_of(module, prompt, sequence.tokens, params), abs=1e-5)


@pytest.mark.parametrize("settings", [{"top_p": 0.8}, {"top_k": 7}, {"temperature": 0.7, "top_k": 9, "top_p": 0.8}])
def test_kept_ids_are_those_drawn_from(module, sampler, settings):
    params = SamplingParams(max_tokens=10, seed=3, logprobs=1, **settings)
    for prompt, response in zip(PROMPTS, sampler.sample(PROMPTS, params), strict=True):
        (sequence,) = response.sequences
        with torch.no_grad():
            logits = module(input_ids=torch.tensor([prompt + sequence.tokens])).logits[0, len(prompt) - 1 : -1]
        expected = filter_logits(logits, params.temperature, params.top_k, params.top_p) > -math.inf
        assert sequence.kept == [row.nonzero().flatten().tolist() for row in expected]
    for off in ({}, {"temperature": 0.0, **{k: v for k, v in settings.items() if k != "temperature"}}):
        assert sampler.sample([[5]], SamplingParams(max_tokens=2, **off))[0].sequences[0].kept is None


def test_greedy_logprobs_are_untempered_and_finite_s12(module, sampler):
    (response,) = sampler.sample([PROMPTS[0]], SamplingParams(temperature=0, max_tokens=10, logprobs=1))
    sequence = response.sequences[0]
    got = [entry[0][1] for entry in sequence.logprobs]
    assert got == pytest.approx(logprobs_of(module, PROMPTS[0], sequence.tokens, SamplingParams()), abs=1e-5)
    assert all(math.isfinite(value) for value in got)


def test_top_logprobs(sampler):
    for params in (SamplingParams(max_tokens=8, seed=1, logprobs=5), SamplingParams(max_tokens=8, seed=1, logprobs=5, top_k=3)):
        (response,) = sampler.sample([PROMPTS[0]], params)
        for token, entries in zip(response.sequences[0].tokens, response.sequences[0].logprobs, strict=True):
            assert entries[0][0] == token
            assert len({token for token, _ in entries}) == len(entries) == (5 if params.top_k < 0 else 3)
            others = [value for _, value in entries[1:]]
            assert others == sorted(others, reverse=True)
            assert sum(math.exp(value) for _, value in entries) <= 1 + 1e-5


def test_prompt_logprobs_score_without_sampling(module, sampler, monkeypatch):
    params = SamplingParams(max_tokens=0, temperature=0.5, prompt_logprobs=2)
    whole = sampler.sample(PROMPTS, params)
    monkeypatch.setattr(sampler_module, "_SCORED_LOGITS", 512 * 3)  # pieces of three positions
    pieces = sampler.sample(PROMPTS, params)
    for prompt, response, again in zip(PROMPTS, whole, pieces, strict=True):
        with torch.no_grad():
            expected = module(input_ids=torch.tensor([prompt])).logits[0].log_softmax(-1)
        assert response.prompt_logprobs[0] is None
        values = [expected[i, token].item() for i, token in enumerate(prompt[1:])]
        assert response.prompt_logprobs[1:] == pytest.approx(values, abs=1e-5)
        assert again.prompt_logprobs[1:] == pytest.approx(values, abs=1e-5)
        for i, top in enumerate(response.topk_prompt_logprobs[1:]):
            assert [token for token, _ in top] == expected[i].topk(2).indices.tolist()
        assert (response.sequences[0].tokens, response.sequences[0].stop_reason) == ([], "length")
        assert response.prompt_token_ids == prompt


def test_scoring_prompts_does_not_change_what_is_sampled(sampler):
    params = SamplingParams(max_tokens=8, seed=4, num_samples=2)
    scored = sampler.sample(PROMPTS, SamplingParams(**{**asdict(params), "prompt_logprobs": 0}))
    assert tokens(scored) == tokens(sampler.sample(PROMPTS, params))
    assert scored[0].topk_prompt_logprobs is None
    assert len(scored[0].prompt_logprobs) == len(PROMPTS[0])


# --- keyed randomness -----------------------------------------------------------------------------------------------


def test_samples_do_not_depend_on_the_batch(module, template):
    params = SamplingParams(max_tokens=16, seed=7, num_samples=3)
    all_at_once = tokens(TransformersSampler(module, template).sample(PROMPTS, params))
    for max_rows in (1, 2, 7):
        assert tokens(TransformersSampler(module, template, max_rows=max_rows).sample(PROMPTS, params)) == all_at_once
    order = [3, 0, 4]
    part = TransformersSampler(module, template).sample([PROMPTS[i] for i in order], params, prompt_indices=order)
    assert tokens(part) == [all_at_once[i] for i in order]


def test_more_samples_or_tokens_extend_the_same_ones(sampler):
    few = tokens(sampler.sample(PROMPTS, SamplingParams(max_tokens=5, seed=7, num_samples=2)))
    many = tokens(sampler.sample(PROMPTS, SamplingParams(max_tokens=90, seed=7, num_samples=4)))
    assert few == [[sequence[:5] for sequence in group[:2]] for group in many]


def test_each_key_draws_anew(sampler):
    params = SamplingParams(max_tokens=16, seed=7)
    draws = [
        sampler.sample(PROMPTS, params),
        sampler.sample(PROMPTS, params, step=1),
        sampler.sample(PROMPTS, params, purpose="evaluation"),
        sampler.sample(PROMPTS, params, prompt_indices=[10, 11, 12, 13, 14]),
        sampler.sample(PROMPTS, SamplingParams(max_tokens=16, seed=8)),
        sampler.sample(PROMPTS, SamplingParams(max_tokens=16)),
        sampler.sample(PROMPTS, SamplingParams(max_tokens=16)),
    ]
    assert len({str(tokens(d)) for d in draws}) == len(draws)


def test_groups_and_workers_s13():
    model = small_qwen(vocab=16, tie_word_embeddings=True)
    with torch.no_grad():
        model.model.norm.weight.zero_()  # equal logits
    params = SamplingParams(max_tokens=8, num_samples=4, seed=7, logprobs=1)
    before = copy.deepcopy(params)
    sampler = TransformersSampler(model)
    first = sampler.sample([[1, 2, 3]], params)
    assert len({tuple(s.tokens) for s in first[0].sequences}) == 4
    assert first[0].sequences[0].logprobs[0][0][1] == pytest.approx(-math.log(16), abs=1e-6)
    assert tokens(sampler.sample([[1, 2, 3]], params)) == tokens(first)
    assert tokens(sampler.sample([[1, 2, 3]], params, prompt_indices=[1])) != tokens(first)
    assert params == before


def test_frequencies_are_the_probabilities(module, sampler):
    count, params = 4000, SamplingParams(max_tokens=1, seed=0, num_samples=4000, top_k=6, temperature=1.5)
    (response,) = sampler.sample([PROMPTS[0]], params)
    with torch.no_grad():
        logits = module(input_ids=torch.tensor([PROMPTS[0]])).logits[:, -1]
    probs = filter_logits(logits, 1.5, 6, 1.0).softmax(-1)[0]
    seen = torch.bincount(torch.tensor([s.tokens[0] for s in response.sequences]), minlength=512)
    for token in probs.nonzero().flatten().tolist():
        p = probs[token].item()
        assert abs(seen[token].item() - count * p) < 4.5 * math.sqrt(count * p * (1 - p)) + 1
    assert seen[probs == 0].sum() == 0


def test_global_generators_are_left_alone(sampler):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    sampler.sample(PROMPTS, SamplingParams(max_tokens=4, seed=1))
    assert torch.equal(torch.get_rng_state(), before)


# --- where a completion ends ----------------------------------------------------------------------------------------


def greedy(sampler, prompt, count, **settings):
    return sampler.sample([prompt], SamplingParams(temperature=0, max_tokens=count, logprobs=1, **settings))[0].sequences[0]


def test_a_cut_answer_keeps_its_last_token_s06(sampler):
    long, cut = greedy(sampler, PROMPTS[0], 12), greedy(sampler, PROMPTS[0], 4)
    assert (cut.tokens, cut.stop_reason) == (long.tokens[:4], "length")


def test_a_stop_token_is_part_of_the_answer(sampler):
    free = greedy(sampler, PROMPTS[0], 12)
    end = free.tokens[5]
    stopped = greedy(sampler, PROMPTS[0], 12, stop=[end])
    first = free.tokens.index(end)
    assert (stopped.tokens, stopped.stop_reason) == (free.tokens[: first + 1], "stop")
    assert len(stopped.logprobs) == len(stopped.tokens)
    assert stopped.decoded == sampler.tokenizer.decode(free.tokens[:first], skip_special_tokens=True)


def test_an_answer_of_only_the_end_token_has_one_trained_token_s14(sampler):
    end = greedy(sampler, PROMPTS[0], 1).tokens[0]
    only = greedy(sampler, PROMPTS[0], 12, stop=[end])
    assert (only.tokens, only.stop_reason, only.decoded) == ([end], "stop", "")
    feature = only.new_input_feature
    assert [label for label in feature["labels"] if label != IGNORE_INDEX] == [end]
    assert feature["labels"][len(PROMPTS[0]) - 1] == end


def test_end_tokens_come_from_the_generation_config(module, template):
    model = copy.deepcopy(module)
    sampler = TransformersSampler(model, template)
    end = greedy(sampler, PROMPTS[0], 12).tokens[5]
    model.generation_config.eos_token_id = [2, end]
    assert greedy(sampler, PROMPTS[0], 12).stop_reason == "stop"


def test_stop_string_keeps_ids_and_logprobs_together_s14(sampler):
    for prompt in PROMPTS:
        free = greedy(sampler, prompt, 30)
        text = free.decoded
        for start in range(0, len(text) - 4, 19):
            stop = text[start : start + 4]
            stopped = greedy(sampler, prompt, 30, stop=stop)
            assert stopped.stop_reason == "stop"
            assert stopped.decoded == text[: text.index(stop)]
            assert stopped.tokens == free.tokens[: len(stopped.tokens)]
            assert len(stopped.logprobs) == len(stopped.tokens)
            shorter = sampler.tokenizer.decode(stopped.tokens[:-1], skip_special_tokens=True)
            assert stop not in shorter.replace("�", ""), "it stopped later than it could"


def test_a_prompt_that_fills_the_context_s14():
    sampler = TransformersSampler(small_qwen(positions=8))
    params = SamplingParams(temperature=0, max_tokens=5, num_samples=2, logprobs=1)
    full, short, nearly = sampler.sample([[1] * 8, [1, 2], [3] * 6], params)
    for sequence in full.sequences:
        assert (sequence.tokens, sequence.stop_reason, sequence.logprobs) == ([], "length", [])
        assert set(sequence.new_input_feature["labels"]) == {IGNORE_INDEX}
    assert [len(s.tokens) for s in short.sequences] == [5, 5]
    assert [len(s.tokens) for s in nearly.sequences] == [2, 2]
    assert short.sequences[0].tokens == sampler.sample([[1, 2]], params)[0].sequences[0].tokens
    with pytest.raises(DataError, match="prompt 1 has 9 tokens, the model reads at most 8"):
        sampler.sample([[1], [1] * 9], params)


def test_without_max_tokens_the_context_is_the_limit():
    (response,) = TransformersSampler(small_qwen(positions=20)).sample([[1, 2, 3]], SamplingParams(seed=0))
    assert len(response.sequences[0].tokens) == 17


# --- requests -------------------------------------------------------------------------------------------------------


def test_inputs_of_every_kind(sampler):
    conversation = {"messages": [{"role": "user", "content": "What is the sum?"}]}
    ids = sampler.template.encode(conversation, add_generation_prompt=True)["input_ids"]
    params = SamplingParams(max_tokens=6, seed=1)
    by_message, by_ids, by_feature, by_tensor = (
        sampler.sample([value], params)[0] for value in (conversation, ids, {"input_ids": ids}, torch.tensor(ids))
    )
    assert by_message.prompt_token_ids == ids
    assert tokens([by_message]) == tokens([by_ids]) == tokens([by_feature]) == tokens([by_tensor])
    assert sampler.sample([], params) == []


def test_the_row_grows_over_turns(sampler):
    params = SamplingParams(max_tokens=4, seed=1, logprobs=1)
    first = sampler.sample([{"input_ids": [5, 9, 30], "row": "data:1"}], params)[0].sequences[0].new_input_feature
    # The environment answers with two tokens that are not trained.
    longer = {**first, "input_ids": first["input_ids"] + [70, 71], "labels": first["labels"] + [IGNORE_INDEX] * 2}
    second = sampler.sample([longer], params)[0].sequences[0]
    feature = second.new_input_feature
    assert feature["input_ids"] == longer["input_ids"] + second.tokens
    assert len(feature["labels"]) == len(feature["input_ids"]) == feature["length"]
    for position, label in enumerate(feature["labels"]):
        assert label == IGNORE_INDEX or label == feature["input_ids"][position + 1]
    assert [x for x in feature["labels"] if x != IGNORE_INDEX] == first["input_ids"][3:] + second.tokens
    assert feature["row"] == "data:1"


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt 1 is empty"),
        ([1, -1], "prompt 1, position 1: -1"),
        ([512], "prompt 1, position 0: 512"),
        ([1, True], "prompt 1, position 1: True"),
        ([1.5], "prompt 1, position 0: 1.5"),
        ({"text": "x"}, "prompt 1: "),
        ({"messages": []}, "prompt 1: "),
    ],
)
def test_bad_prompts_are_named(sampler, prompt, message):
    with pytest.raises(DataError, match=message):
        sampler.sample([[1, 511], prompt], SamplingParams(max_tokens=1))


def test_what_needs_a_template_says_so(module):
    sampler = TransformersSampler(module)
    assert sampler.sample([[1]], SamplingParams(max_tokens=1))[0].sequences[0].decoded is None
    with pytest.raises(DataError, match="no template"):
        sampler.sample([{"messages": [{"role": "user", "content": "x"}]}])
    with pytest.raises(UserError, match="template"):
        list(sampler.sample_stream([1]))


def test_params_as_a_dict(sampler):
    assert len(sampler.sample([[5]], {"max_new_tokens": 3, "seed": 0})[0].sequences[0].tokens) == 3
    with pytest.raises(ValueError, match="unknown sampling parameter 'max_token'"):
        sampler.sample([[5]], {"max_token": 3})
    with pytest.raises(ValueError, match="prompt_indices has 2 entries for 1 inputs"):
        sampler.sample([[5]], prompt_indices=[0, 1])


def test_nan_logits_name_the_prompt(module):
    model = copy.deepcopy(module)
    with torch.no_grad():
        model.get_input_embeddings().weight[444] = math.nan  # tied: also the logits of token 444
        model.lm_head.weight = torch.nn.Parameter(module.lm_head.weight.clone())
    sampler = TransformersSampler(model)
    prompts = [[5, 9], [5, 444, 9], [60]]
    for settings in ({"temperature": 0}, {"seed": 1}, {"seed": 1, "top_k": 5}, {"seed": 1, "top_p": 0.9}):
        with pytest.raises(NonFiniteLogits, match="prompt 1: the model gives NaN"):
            sampler.sample(prompts, SamplingParams(max_tokens=3, **settings))
    with pytest.raises(NonFiniteLogits, match="prompt 1: .* within the prompt"):
        sampler.sample(prompts, SamplingParams(max_tokens=0, prompt_logprobs=0))


# --- streaming ------------------------------------------------------------------------------------------------------


def test_streamed_text_is_the_decoded_text(sampler):
    for prompt in PROMPTS:
        params = SamplingParams(max_tokens=40, seed=2, stop=["th", "\n"])
        sequence = sampler.sample([prompt], params)[0].sequences[0]
        chunks = list(sampler.sample_stream(prompt, params))
        assert "".join(chunk.delta for chunk in chunks) == sequence.decoded
        assert [chunk.finish_reason for chunk in chunks][-1] == sequence.stop_reason
        assert all(chunk.finish_reason is None for chunk in chunks[:-1])


def test_a_stream_may_be_dropped(module, sampler):
    module.train()
    stream = sampler.sample_stream([5, 9], SamplingParams(max_tokens=40, seed=2))
    next(stream)
    assert torch.is_grad_enabled()
    stream.close()
    assert module.training
    module.eval()
