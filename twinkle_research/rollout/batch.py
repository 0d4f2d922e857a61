"""What a rollout gives: completions with their rewards and advantages, in the order of their prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from twinkle_research.data_format import IGNORE_INDEX, InputFeature


@dataclass
class Completion:
    """One sampled answer.

    ``feature``: prompt and answer as they were sampled, the labels on the sampled tokens. Lists of floats have one entry a
    trained token.
    """

    prompt: int  # number of the prompt in its rollout
    k: int  # number of the completion in its group
    feature: InputFeature
    logprobs: list[float]  # of all sampled tokens, as the sampler gave them
    text: str  # without the token that stopped it
    stop_reason: str
    prompt_text: str = ""
    answer: str | None = None  # of the row, for whoever reads the samples
    reward: float | None = None  # None: could not be scored
    rewards: dict[str, float | None] = field(default_factory=dict)  # its parts
    advantages: list[float] = field(default_factory=list)
    old_logprobs: list[float] | None = None
    ref_logprobs: list[float] | None = None
    old_values: list[float] | None = None
    returns: list[float] | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.logprobs)

    @property
    def num_trained(self) -> int:
        """All sampled tokens, or none where the completion is masked."""
        return sum(label != IGNORE_INDEX for label in self.feature["labels"])

    @property
    def truncated(self) -> bool:
        return self.stop_reason == "length"


@dataclass
class RolloutBatch:
    """``completions``: groups of ``num_generations``, one after the other. ``step``: optimizer steps done when they were
    sampled. ``drawn``: prompts that were sampled for it, ``flat`` of them with rewards that say nothing, which dynamic sampling
    leaves out; ``reward``: the mean of all that were sampled."""

    step: int
    num_generations: int
    completions: list[Completion]
    drawn: int
    flat: int = 0
    reward: float | None = None
    counts: dict[str, int] = field(default_factory=dict)  # what happened to the rewards that a person should know of
    done: int = 0  # optimizer steps made on it

    @property
    def groups(self) -> list[list[Completion]]:
        n = self.num_generations
        return [self.completions[i : i + n] for i in range(0, len(self.completions), n)]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> RolloutBatch:
        return cls(**{**data, "completions": [Completion(**completion) for completion in data["completions"]]})


def masked(feature: InputFeature) -> InputFeature:
    """The same row with nothing to train."""
    rest = {name: value for name, value in feature.items() if name != "kept_ids"}
    return {**rest, "labels": [IGNORE_INDEX] * len(feature["labels"])}


def metrics(completions: Sequence[Completion], batch: RolloutBatch) -> dict[str, float | None]:
    """Of one optimizer step's completions, over all ranks; what concerns the whole rollout stands at its first step. None where
    there is nothing to measure, such as the mean reward of completions that nobody could score."""
    whole = {
        "rollout/prompts": float(batch.drawn),
        "rollout/flat_groups": batch.flat / max(1, batch.drawn),
        "rollout/reward_mean": batch.reward,
    } | {f"reward/{name}": float(n) for name, n in batch.counts.items()}
    rewards = [c.reward for c in completions if c.reward is not None]
    advantages = [value for c in completions for value in c.advantages]
    lengths = [c.num_tokens for c in completions]
    return {
        "reward/mean": _mean(rewards),
        "reward/std": _std(rewards),
        "reward/unscored": float(len(completions) - len(rewards)),
        **{f"reward/{name}": _mean(_known(completions, name)) for name in _parts(completions)},
        "advantage/mean": _mean(advantages),
        "advantage/std": _std(advantages),
        "advantage/max": max(advantages, default=None),
        "advantage/min": min(advantages, default=None),
        "completion/length_mean": _mean(lengths),
        "completion/length_max": max(map(float, lengths), default=None),
        "completion/truncated": _mean([float(c.truncated) for c in completions]),
        "entropy": _mean([-logprob for c in completions for logprob in c.logprobs]),
        **(whole if batch.done == 0 else {}),
    }


def is_flat(group: Sequence[Completion]) -> bool:
    """Whether the rewards of a group say nothing: fewer than two are known, or all are equal."""
    return len({c.reward for c in group if c.reward is not None}) < 2


def mean_reward(groups: Sequence[Sequence[Completion]]) -> float | None:
    """Of all completions that could be scored."""
    return _mean([c.reward for group in groups for c in group if c.reward is not None])


def _parts(completions: Sequence[Completion]) -> list[str]:
    names = list(dict.fromkeys(name for c in completions for name in c.rewards))
    return names if len(names) > 1 else []


def _known(completions: Sequence[Completion], name: str) -> list[float]:
    return [c.rewards[name] for c in completions if c.rewards.get(name) is not None]


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _std(values: Sequence[float]) -> float | None:
    """Of the population."""
    mean = _mean(values)
    return None if mean is None else math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
