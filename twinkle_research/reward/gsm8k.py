"""Rewards for GSM8K (Cobbe et al. 2021, arXiv:2110.14168): the result after #### or in \\boxed{}."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal

from twinkle_research.data_format import Trajectory
from twinkle_research.reward.base import Reward, completion_of
from twinkle_research.reward.text import NUMBER, last_number, number_answer, to_number

TOLERANCE = Decimal("1e-5")
# In \\boxed{} a unit may follow the number, an operator may not: \\boxed{3/4} is not 3.
_MARKED = re.compile(
    rf"####\s*\\?\$?\s*({NUMBER.pattern})"
    rf"|\\boxed\s*{{\s*\\?\$?\s*({NUMBER.pattern})(?=\s*(?:\\?[%$]|\\[a-z,; ]|[A-Za-z]|}}))",
    re.ASCII,
)


def marked_number(text: str) -> Decimal | None:
    """The number after the last ``####`` or at the start of the last ``\\boxed{}``, whichever comes last; None without one."""
    found = _MARKED.findall(text)
    return to_number("".join(found[-1])) if found else None


class GSM8KAccuracyReward(Reward):
    """1 where the marked number is the row's answer, to 1e-5; else 0.

    The answer is the column ``ground_truth`` or ``answer``: a number, or a solution that ends in ``#### number``.
    ``flexible``: the last number counts where none is marked. ``format_score``: given for a wrong number that is marked.
    """

    def __init__(self, flexible: bool = False, format_score: float = 0.0):
        self.flexible = flexible
        self.format_score = format_score

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[float | None]:
        return [self._score(completion_of(t), _answer(t)) for t in trajectories]

    def check(self, trajectory: Trajectory) -> None:
        _answer(trajectory)

    def _score(self, completion: str, answer: Decimal) -> float:
        marked = marked_number(completion)
        found = last_number(completion) if marked is None and self.flexible else marked
        if found is not None and abs(found - answer) < TOLERANCE:
            return 1.0
        return 0.0 if marked is None else self.format_score


def _answer(trajectory: Trajectory) -> Decimal:
    return number_answer(trajectory, "gsm8k", "answer", "ground_truth")


class GSM8KFormatReward(Reward):
    """1 where the completion marks a number, by ``####`` or ``\\boxed{}``; else 0."""

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[float | None]:
        return [float(marked_number(completion_of(t)) is not None) for t in trajectories]
