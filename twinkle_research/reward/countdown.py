"""Countdown: make a target from given numbers."""

from __future__ import annotations

import re
from collections.abc import Sequence

from twinkle_research.data_format import Trajectory
from twinkle_research.errors import DataError
from twinkle_research.reward.arithmetic import evaluate
from twinkle_research.reward.base import Reward, column_of, completion_of, row_of

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class CountdownReward(Reward):
    """1 where the completion's expression has the row's ``numbers``, each as often as there, and the value ``target``.

    The expression is what stands in the last ``<answer>...</answer>``, else the last line that is not empty; what follows an
    equals sign does not count. It may have + - * / and parentheses; it is read, never run. ``format_score``: given for an
    expression of the right numbers that misses the target.
    """

    def __init__(self, format_score: float = 0.0):
        self.format_score = format_score

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[float | None]:
        return [self._score(t) for t in trajectories]

    def check(self, trajectory: Trajectory) -> None:
        _given(trajectory)

    def _score(self, trajectory: Trajectory) -> float:
        numbers, target = _given(trajectory)
        try:
            expression = evaluate(expression_of(completion_of(trajectory)))
        except ValueError:
            return 0.0
        if sorted(expression.numbers) != sorted(numbers):
            return 0.0
        return 1.0 if expression.value == target else self.format_score


def _given(trajectory: Trajectory) -> tuple[list[int], int]:
    """The row's numbers and target."""
    numbers = column_of(trajectory, "numbers", "nums", reward="countdown")
    target = column_of(trajectory, "target", reward="countdown")
    if not isinstance(numbers, list | tuple) or not all(type(n) is int for n in [*numbers, target]):
        raise DataError(
            f"{row_of(trajectory)}: reward=countdown needs 'numbers', a list of whole numbers, and 'target', a whole number"
        )
    return list(numbers), target


def expression_of(completion: str) -> str:
    blocks = _ANSWER.findall(completion)
    lines = [line for line in (blocks[-1] if blocks else completion).splitlines() if line.strip()]
    return lines[-1].partition("=")[0] if lines else ""
