"""Trained ids are the sampled ids, in the chat format of every family; and what a rollout makes of odd answers."""

import random
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from twinkle_research.data_format import IGNORE_INDEX, SamplingParams
from twinkle_research.dataset.prompts import PromptDataset
from twinkle_research.dataset.rows import Origin, SourceRow
from twinkle_research.distributed.runtime import Runtime
from twinkle_research.reward.base import Part, Reward, Scorer
from twinkle_research.rollout.batch import Completion, RolloutBatch, is_flat, masked, metrics
from twinkle_research.rollout.single_turn import SingleTurnRollout
from twinkle_research.sampler.transformers import TransformersSampler
from twinkle_research.template import Template

sys.path.insert(0, str(Path(__file__).parents[1] / "template"))
from families import FAMILIES
from test_families import conversation


class NoClock:
    @contextmanager
    def part(self, name):
        with nullcontext():
            yield


class Seen(Reward):
    """Keeps what it was shown; scores the length of the text."""

    def __init__(self):
        self.trajectories = []

    def __call__(self, trajectories):
        self.trajectories += trajectories
        return [float(len(t["completion"])) for t in trajectories]


def rollout_on(tokenizer, rows, **options):
    """(rollout, prompts, reward) with a random model of the tokenizer's vocabulary."""
    template = Template(tokenizer=tokenizer, max_length=None)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=4096, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).eval()
    source = [SourceRow(i, Origin("rows", i), row) for i, row in enumerate(rows)]
    reward = Seen()
    sampler = TransformersSampler(model, template, **options)
    rollout = SingleTurnRollout(sampler, Scorer([Part("seen", 1.0, reward)]), Runtime(), NoClock())
    return rollout, PromptDataset("rows", source, template), reward


@pytest.mark.parametrize("name", FAMILIES)
def test_trained_ids_are_the_sampled_ids(name):
    """S15: 20 prompts (system, tools, earlier turns, thinking), 2 completions each, of a model that samples any token. The
    row that is trained is the prompt's ids, as the template alone gives them, and then the sampled ids, unchanged; the labels
    are those, one position earlier."""
    rng = random.Random(name)
    rows = []
    while len(rows) < 20:
        row = conversation(rng, name)
        last = max(i for i, m in enumerate(row["messages"]) if m["role"] == "user")
        rows.append({**row, "messages": row["messages"][: last + 1], "answer": "x"})
    tokenizer = FAMILIES[name].tokenizer()
    rollout, prompts, reward = rollout_on(tokenizer, rows)
    params = SamplingParams(max_tokens=12, seed=3, logprobs=1, num_samples=2)
    found = rollout(prompts, range(20), params, step=0, purpose="rollout").completions
    assert [(c.prompt, c.k) for c in found] == [(i, k) for i in range(20) for k in range(2)]
    plain = Template(tokenizer=tokenizer, max_length=None)
    for c in found:
        prompt = plain.encode(rows[c.prompt], add_generation_prompt=True)["input_ids"]
        ids, labels = c.feature["input_ids"], c.feature["labels"]
        sampled = ids[len(prompt) :]
        assert ids[: len(prompt)] == prompt and len(sampled) == len(c.logprobs) == c.num_tokens > 0
        assert labels == [IGNORE_INDEX] * (len(prompt) - 1) + sampled + [IGNORE_INDEX]
    texts = [tokenizer.decode(c.feature["input_ids"][-c.num_tokens :]) for c in found]
    again = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    assert any(a != c.feature["input_ids"][-c.num_tokens :] for a, c in zip(again, found))  # encoding the text again would not do


def test_what_rewards_see():
    tokenizer = FAMILIES["qwen2.5"].tokenizer()
    rows = [{"messages": [{"role": "user", "content": "2+2"}], "answer": "4", "level": 7}]
    rollout, prompts, reward = rollout_on(tokenizer, rows)
    (c,) = rollout(prompts, [0], SamplingParams(max_tokens=3, seed=0, logprobs=1), step=0, purpose="rollout").completions
    (seen,) = reward.trajectories
    assert seen["completion"] == c.text == seen["messages"][-1]["content"] and seen["messages"][0]["content"] == "2+2"
    assert dict(seen["user_data"]) == {"answer": "4", "level": 7}
    assert seen["num_tokens"] == c.num_tokens == 3 and seen["stop_reason"] == c.stop_reason == "length"
    assert c.reward == len(c.text) and c.answer == "4" and c.prompt_text == "2+2"


def test_draws_depend_on_their_key_only():
    """Neither on which prompts are sampled together nor on how many rows go at a time; another step or purpose draws anew."""
    tokenizer = FAMILIES["qwen2.5"].tokenizer()
    rows = [{"messages": [{"role": "user", "content": "u" * n}], "answer": ""} for n in (1, 30, 5, 9)]
    params = SamplingParams(max_tokens=8, seed=1, logprobs=1, num_samples=3)

    def ids(numbers, first=0, step=0, purpose="rollout", **options):
        rollout, prompts, _ = rollout_on(tokenizer, rows, **options)
        played = rollout(prompts, numbers, params, step=step, purpose=purpose, first=first)
        return [c.feature["input_ids"] for c in played.completions]

    whole = ids(range(4))
    assert ids(range(4), max_rows=1) == whole
    assert ids([2, 3], first=2) == whole[6:]
    assert ids(range(4), step=1) != whole and ids(range(4), purpose="eval") != whole
    assert len({tuple(row) for row in whole[:3]}) == 3  # S13: a group's completions differ


def completion(reward, *, stop="stop", logprobs=(-1.0, -2.0), advantages=()):
    feature = {"input_ids": [1, 2, 3], "labels": [2, 3, IGNORE_INDEX]}
    return Completion(
        0, 0, feature, list(logprobs), "t", stop, reward=reward, rewards={"a": reward, "b": 1.0}, advantages=list(advantages)
    )


def test_metrics_of_a_step():
    batch = RolloutBatch(0, 2, [], drawn=4, flat=1, reward=0.25, counts={"math/timeouts": 2})
    found = metrics([completion(1.0, advantages=[1.0, 1.0]), completion(None, stop="length", advantages=[0.0, 0.0])], batch)
    assert found["reward/mean"] == 1.0 and found["reward/std"] == 0.0 and found["reward/unscored"] == 1.0
    assert found["reward/a"] == 1.0 and found["reward/b"] == 1.0
    assert found["advantage/mean"] == 0.5 and found["advantage/std"] == 0.5
    assert found["completion/truncated"] == 0.5 and found["completion/length_mean"] == 2.0 and found["entropy"] == 1.5
    assert found["rollout/prompts"] == 4 and found["rollout/flat_groups"] == found["rollout/reward_mean"] == 0.25
    assert found["reward/math/timeouts"] == 2
    batch.done = 1
    assert "rollout/prompts" not in metrics([completion(None)], batch)
    assert metrics([], batch)["reward/mean"] is None and metrics([], batch)["completion/length_mean"] is None


def test_flat_groups_and_masks():
    assert is_flat([completion(1.0), completion(1.0)]) and is_flat([completion(1.0), completion(None)])
    assert not is_flat([completion(1.0), completion(0.0), completion(None)])
    feature = {"input_ids": [1, 2], "labels": [2, IGNORE_INDEX], "kept_ids": [[2]]}
    assert masked(feature) == {"input_ids": [1, 2], "labels": [IGNORE_INDEX] * 2} and "kept_ids" in feature


def test_a_rollout_survives_json():
    import json

    batch = RolloutBatch(4, 1, [completion(0.1 + 0.2, advantages=[1 / 3, 2 / 3])], drawn=1, done=2)
    assert RolloutBatch.from_json(json.loads(json.dumps(batch.to_json()))) == batch
