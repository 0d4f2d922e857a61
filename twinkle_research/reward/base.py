"""What a reward is, and the Scorer that a run uses: one reward, or several with weights."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from twinkle_research.data_format import Trajectory
from twinkle_research.errors import DataError, nearest


class Reward(ABC):
    """Judges completions. Higher is better; None: could not be judged, which is not the same as 0."""

    @abstractmethod
    def __call__(self, trajectories: Sequence[Trajectory]) -> list[float | None]:
        """One number (or None) for each trajectory, in order."""

    def check(self, trajectory: Trajectory) -> None:  # noqa: B027 (some can judge any row)
        """Raises DataError for a prompt whose row has not what this reward needs; nothing has been sampled yet."""

    def take_counts(self) -> dict[str, int]:
        """What happened since the last call that a person should know of, such as "timeouts"."""
        return {}

    def close(self) -> None:  # noqa: B027 (most have nothing to end)
        """Ends what it has started, such as processes."""


@dataclass
class RewardResult:
    """``totals[i]``: the reward of trajectory i, None where it could not be judged. ``parts``: by name, before weights.
    ``counts``: "unscored" and, by "part/what", what else happened (how often)."""

    totals: list[float | None]
    parts: dict[str, list[float | None]]
    counts: dict[str, int] = field(default_factory=dict)


@dataclass
class Part:
    name: str
    weight: float
    reward: Reward


class Scorer:
    """The weighted sum of one or several rewards. A context manager; ``close`` may be called more than once.

    A trajectory that a part cannot judge has no total; with ``skip_unscored`` its total is the sum over the other parts,
    for parts that each judge some rows only.
    """

    def __init__(self, parts: Sequence[Part], skip_unscored: bool = False):
        self.parts = list(parts)
        self.skip_unscored = skip_unscored

    def check(self, trajectories: Iterable[Trajectory]) -> None:
        """Looks at all prompts before anything is sampled, so that a bad row does not end a run that has come far."""
        for trajectory in trajectories:
            for part in self.parts:
                part.reward.check(trajectory)

    def score(self, trajectories: Sequence[Trajectory]) -> RewardResult:
        parts: dict[str, list[float | None]] = {}
        counts: dict[str, int] = {}
        for part in self.parts:
            scores = [None if score is None or math.isnan(score) else float(score) for score in part.reward(trajectories)]
            if len(scores) != len(trajectories):
                raise ValueError(f"reward {part.name} gave {len(scores)} scores for {len(trajectories)} trajectories")
            parts[part.name] = scores
            counts |= {f"{part.name}/{what}": count for what, count in part.reward.take_counts().items()}
        totals = [self._total([parts[part.name][i] for part in self.parts]) for i in range(len(trajectories))]
        counts["unscored"] = sum(total is None for total in totals)
        return RewardResult(totals, parts, counts)

    def _total(self, scores: list[float | None]) -> float | None:
        judged = [part.weight * score for part, score in zip(self.parts, scores, strict=True) if score is not None]
        if not judged or (len(judged) < len(scores) and not self.skip_unscored):
            return None
        return sum(judged)

    def close(self) -> None:
        for part in self.parts:
            part.reward.close()

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def completion_of(trajectory: Trajectory) -> str:
    """The text that was sampled: ``completion``, else the last message, which must be the assistant's."""
    if "completion" in trajectory:
        return trajectory["completion"]
    last = trajectory["messages"][-1] if trajectory.get("messages") else {}
    if last.get("role") != "assistant":
        raise DataError(f"{row_of(trajectory)}: no completion: the last message is not the assistant's")
    return last.get("content") or ""


def columns_of(trajectory: Trajectory) -> dict[str, Any]:
    """The row's columns beside the prompt, such as ``answer``."""
    return dict(trajectory.get("user_data") or [])


def column_of(trajectory: Trajectory, *names: str, reward: str) -> Any:
    """The first of the columns ``names`` that the row has. Raises DataError naming the row and the columns there are."""
    columns = columns_of(trajectory)
    for name in names:
        if columns.get(name) is not None:
            return columns[name]
    raise DataError(f"{row_of(trajectory)}: reward={reward} needs a column '{names[0]}'; {nearest(names[0], columns)}")


def row_of(trajectory: Trajectory) -> str:
    """Where the row came from, for messages."""
    return trajectory.get("row", "a row")
