"""The advantage of group relative policy optimization."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from twinkle_research.advantage.base import (
    STDS,
    Advantage,
    AdvantageResult,
    Rollouts,
    require_choice,
    require_positive,
    same,
    spread,
)

BASELINES = ("mean", "leave_one_out")
SCALES = ("group", "batch", "none")


class GRPOAdvantage(Advantage):
    """(r - baseline of the group) / (std + eps) (Shao et al. 2024, DeepSeekMath, arXiv:2402.03300, section 4.1.2).

    ``baseline``: ``mean`` of the group, or ``leave_one_out``, that of the group's other answers. ``scale``: the std of the
    ``group``, of the whole ``batch`` (Liu et al. 2025, arXiv:2508.08221), or ``none`` for no division (Dr. GRPO,
    arXiv:2503.20783). ``std``: ``sample`` (n - 1) or ``population`` (n).
    """

    def __init__(
        self, baseline: str = "mean", scale: str = "group", std: str = "sample", eps: float = 1e-8, **common: Any
    ) -> None:
        super().__init__(**common)
        require_choice("baseline", baseline, BASELINES)
        require_choice("scale", scale, SCALES)
        require_choice("std", std, STDS)
        require_positive("eps", eps)
        self.baseline = baseline
        self.scale = scale
        self.std = std
        self.eps = eps

    def __call__(self, rewards: Any, num_generations: int = 1, scale: str | None = None) -> Tensor:
        """[N] advantages of N rewards, numbers or None, or rows of numbers to be summed; ``scale`` None: that of this object."""
        if scale is not None:
            require_choice("scale", scale, SCALES)
        rollouts = Rollouts(rewards, num_generations)
        return self._advantages(self.checked(rollouts), num_generations, scale or self.scale)

    def score(self, rollouts: Rollouts) -> AdvantageResult:
        return AdvantageResult(self._advantages(self.rewards_less_kl(rollouts), rollouts.num_generations, self.scale).tolist())

    def _advantages(self, rewards_N: Tensor, num_generations: int, scale: str) -> Tensor:
        advantages_N = torch.zeros_like(rewards_N)
        everything = spread(rewards_N[~rewards_N.isnan()], self.std)
        for start in range(0, len(rewards_N), num_generations):
            where = slice(start, start + num_generations)
            scored_K = ~rewards_N[where].isnan()
            rewards_K = rewards_N[where][scored_K]
            if same(rewards_K):
                continue
            centred_K = rewards_K - rewards_K.mean()
            if self.baseline == "leave_one_out":
                centred_K = centred_K * (len(rewards_K) / (len(rewards_K) - 1))  # n / (n - 1) (r - mean) = r - mean of others
            if scale != "none":
                centred_K = centred_K / ((spread(rewards_K, self.std) if scale == "group" else everything) + self.eps)
            advantages_N[where][scored_K] = centred_K
        return advantages_N
