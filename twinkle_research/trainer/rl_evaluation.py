"""Evaluation of a reinforcement run on held-out prompts: greedy answers, and k samples of each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from twinkle_research.data_format import SamplingParams
from twinkle_research.rollout.batch import Completion
from twinkle_research.trainer.experience import shown

if TYPE_CHECKING:
    from twinkle_research.dataset.prompts import PromptDataset
    from twinkle_research.rollout.base import Rollout

GREEDY, SAMPLED = "eval_greedy", "eval_sampled"


class RlEvaluation:
    """``params``: how the training rollouts are sampled; ``k`` samples a prompt are drawn in the same way. A completion is
    right where its reward is at least ``success``."""

    def __init__(
        self, rollout: Rollout, prompts: PromptDataset | None, params: SamplingParams, *, k: int, success: float, shown: int
    ) -> None:
        self.rollout = rollout
        self.prompts = prompts
        self.params = params
        self.k = k
        self.success = success
        self.shown = shown
        self._answers: list[Completion] = []

    @property
    def has_work(self) -> bool:
        return self.prompts is not None

    def metrics(self, step: int) -> dict[str, float]:
        """``eval/accuracy`` (share of right greedy answers), ``eval/reward`` (their mean reward), ``eval/mean@k`` and
        ``eval/pass@k`` (share of right samples, and of prompts with a right one), ``eval/k``. An answer that cannot be scored
        is not right."""
        if self.prompts is None:
            return {}
        greedy = self._play(SamplingParams.from_dict(self.params.to_dict() | _GREEDY), step, GREEDY)
        self._answers = greedy[: self.shown]
        known = [c.reward for c in greedy if c.reward is not None]
        found = {
            "eval/accuracy": self._right(greedy),
            "eval/reward": math.fsum(known) / len(known) if known else 0.0,
            "eval/length_mean": sum(c.num_tokens for c in greedy) / len(greedy),
        }
        if self.k:
            sampled = self._play(SamplingParams.from_dict(self.params.to_dict() | {"num_samples": self.k}), step, SAMPLED)
            groups = [sampled[i : i + self.k] for i in range(0, len(sampled), self.k)]
            passed = sum(any(map(self._is_right, group)) for group in groups) / len(groups)
            found |= {"eval/mean@k": self._right(sampled), "eval/pass@k": passed, "eval/k": self.k}
        return found

    def objective(self, metrics: dict[str, float]) -> float | None:
        return metrics.get("eval/accuracy")

    def cost(self, metrics: dict[str, float]) -> float | None:
        accuracy = self.objective(metrics)
        return None if accuracy is None else 1.0 - accuracy

    def answers(self) -> list[dict[str, Any]]:
        """Greedy answers of the last ``metrics``."""
        return [shown(completion) for completion in self._answers]

    def _play(self, params: SamplingParams, step: int, purpose: str) -> list[Completion]:
        return self.rollout(self.prompts, range(len(self.prompts)), params, step=step, purpose=purpose).completions

    def _is_right(self, completion: Completion) -> bool:
        return completion.reward is not None and completion.reward >= self.success

    def _right(self, completions: Sequence[Completion]) -> float:
        return sum(map(self._is_right, completions)) / len(completions)


_GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "num_samples": 1}
