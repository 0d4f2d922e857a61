"""Mathematical answers, compared by math-verify."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from twinkle_research.data_format import Trajectory
from twinkle_research.dataset.tasks.written import last_boxed
from twinkle_research.errors import UserError
from twinkle_research.reward.base import Reward, column_of, completion_of
from twinkle_research.reward.workers import WorkerPool


class JudgedReward(Reward):
    """A reward that processes of ``judge.py`` give. What they cannot judge is None, and counted by reason."""

    def __init__(self, kind: str, module: str, package: str, workers: int, timeout: float):
        if find_spec(module) is None:
            raise UserError(f"reward={kind} needs the package {package}: pip install 'twinkle_research[rewards]'")
        self._pool = WorkerPool(kind, workers, timeout)
        self._counts: Counter[str] = Counter()

    def scores(self, items: Sequence[dict[str, Any]]) -> list[float | None]:
        judgements = self._pool.judge(items)
        self._counts.update(judgement.problem for judgement in judgements if judgement.problem is not None)
        return [judgement.score for judgement in judgements]

    def take_counts(self) -> dict[str, int]:
        counts, self._counts = dict(self._counts), Counter()
        return counts

    def close(self) -> None:
        self._pool.close()


class MathReward(JudgedReward):
    """1 where math-verify finds the completion's result (in ``\\boxed{}``, or the last expression) equal to the answer; else 0.

    ``ground_truth_key``: column with the answer, as LaTeX or plain text, or a whole solution with ``\\boxed{}``. ``workers``
    processes compare; ``timeout``: seconds for one completion. Counts "timeouts", "crashes", "errors" and
    "unreadable_answers" (rows whose own answer is no mathematics); these have no score.
    """

    def __init__(self, ground_truth_key: str = "solution", workers: int = 1, timeout: float = 5.0):
        super().__init__("math", "math_verify", "math-verify", workers, timeout)
        self.ground_truth_key = ground_truth_key

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[float | None]:
        return self.scores(
            [{"completion": _result(completion_of(t)), "answer": _result(self._answer(t), boxed=True)} for t in trajectories]
        )

    def check(self, trajectory: Trajectory) -> None:
        self._answer(trajectory)

    def _answer(self, trajectory: Trajectory) -> str:
        return str(column_of(trajectory, self.ground_truth_key, reward="math"))


def _result(text: str, boxed: bool = False) -> str:
    """What is compared: the last ``\\boxed{}`` alone (the library would take several in a row for a set), else the text itself.

    ``boxed``: a text that marks no mathematics is mathematics as a whole.
    """
    result = last_boxed(text)
    if result is not None:
        return f"\\boxed{{{result}}}"
    return f"\\boxed{{{text}}}" if boxed and "$" not in text else text
