"""Rewards that look at the completion's text: exact match, last number, form."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from twinkle_research.data_format import Trajectory
from twinkle_research.errors import ConfigError, DataError
from twinkle_research.reward.base import Reward, column_of, completion_of, row_of

# A sign belongs to the number unless something that could be subtracted from stands before it: 5-3 are 5 and 3.
NUMBER = re.compile(
    r"(?:(?<![\w)\]])[-+\u2212])?(?<![\w.])(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,3}(?!\d))?",
    re.ASCII,
)


def to_number(text: str) -> Decimal | None:
    """The value of a text that is one number, thousands commas allowed; None for any other text."""
    text = text.strip()
    return _value(text) if NUMBER.fullmatch(text) else None


def last_number(text: str) -> Decimal | None:
    found = NUMBER.findall(text)
    return _value(found[-1]) if found else None


def _value(text: str) -> Decimal:
    return Decimal(text.replace(",", "").replace("\u2212", "-"))


class ExactReward(Reward):
    """1 where the completion, without space around it, is the row's ``answer``; else 0."""

    def __init__(self, ignore_case: bool = False):
        self.ignore_case = ignore_case

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[float | None]:
        return [float(self._same(completion_of(t), str(column_of(t, "answer", reward="exact")))) for t in trajectories]

    def check(self, trajectory: Trajectory) -> None:
        column_of(trajectory, "answer", reward="exact")

    def _same(self, completion: str, answer: str) -> bool:
        if self.ignore_case:
            completion, answer = completion.casefold(), answer.casefold()
        return completion.strip() == answer.strip()


class NumericReward(Reward):
    """1 where the last number of the completion is at most ``tolerance`` from the row's ``answer``; else 0."""

    def __init__(self, tolerance: float = 0.0):
        self.tolerance = Decimal(repr(float(tolerance)))

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[float | None]:
        return [float(self._right(last_number(completion_of(t)), number_answer(t, "numeric"))) for t in trajectories]

    def check(self, trajectory: Trajectory) -> None:
        number_answer(trajectory, "numeric")

    def _right(self, found: Decimal | None, answer: Decimal) -> bool:
        return found is not None and (found == answer or abs(found - answer) <= self.tolerance)


def number_answer(trajectory: Trajectory, reward: str, *names: str) -> Decimal:
    """The row's answer as a number; of a GSM8K solution what stands after ####. Raises DataError naming the row."""
    answer: Any = column_of(trajectory, *(names or ("answer",)), reward=reward)
    value = to_number(str(answer).rpartition("####")[2])
    if value is None:
        raise DataError(f"{row_of(trajectory)}: reward={reward} needs a number as the answer, got {str(answer)[:80]!r}")
    return value


class FormatReward(Reward):
    """1 where the whole completion has the form that is asked for; else 0.

    ``tags``: ``<a>...</a>`` for each of them, in this order, each once, with nothing but space between and around them. Or
    ``pattern``: a regular expression for the whole completion, in which . also matches line ends.
    """

    def __init__(self, tags: Sequence[str] = ("think", "answer"), pattern: str | None = None):
        if pattern is None:
            # A tag may not occur a second time, inside another one included.
            any_tag = "|".join(re.escape(tag) for tag in tags)
            inner = rf"(?:(?!</?(?:{any_tag})>).)*"
            pattern = r"\s*" + r"\s*".join(rf"<{re.escape(tag)}>{inner}</{re.escape(tag)}>" for tag in tags) + r"\s*"
        try:
            self.pattern = re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise ConfigError(f"reward=format: pattern {pattern!r} is no regular expression: {error}") from error

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[float | None]:
        return [float(self.pattern.fullmatch(completion_of(t)) is not None) for t in trajectories]
