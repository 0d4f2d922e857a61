"""Answers to the tasks of reasoning-gym, judged by the data set they come from."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from twinkle_research.data_format import Trajectory
from twinkle_research.reward.base import column_of, completion_of
from twinkle_research.reward.math import JudgedReward

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class ReasoningGymReward(JudgedReward):
    """``score_answer`` of the row's data set, in [0, 1], for what stands in the last ``<answer>...</answer>``, else for the
    whole completion, without space around it.

    Some data sets of the package run answers as Python code. Here they judge in processes in which lists are read as literals,
    and expressions with anything but numbers, operators and mathematical names score 0 without being looked at.
    """

    def __init__(self, workers: int = 1, timeout: float = 10.0):
        super().__init__("reasoning_gym", "reasoning_gym", "reasoning-gym", workers, timeout)

    def check(self, trajectory: Trajectory) -> None:
        column_of(trajectory, "reasoning_gym", reward="reasoning_gym")

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[float | None]:
        return self.scores([_item(t) for t in trajectories])


def _item(trajectory: Trajectory) -> dict[str, Any]:
    completion = completion_of(trajectory)
    blocks = _ANSWER.findall(completion)
    entry = column_of(trajectory, "reasoning_gym", reward="reasoning_gym")
    return {**entry, "completion": (blocks[-1] if blocks else completion).strip()}
