"""The advantage of on-policy optimization with the optimal baseline."""

from __future__ import annotations

import torch

from twinkle_research.advantage.base import Advantage, AdvantageResult, Rollouts, same, vector


class OPOAdvantage(Advantage):
    """The reward less the group's mean reward weighted by length, sum(l r) / sum(l): the baseline of least variance where the
    gradients of tokens are uncorrelated and alike in size (Hao et al. 2025, arXiv:2505.23585). Not scaled."""

    def __init__(self, kl_coef: float = 0.0, kl_estimator: str = "k1") -> None:
        super().__init__(kl_coef, kl_estimator)
        self.needs = self.needs | {"lengths"}

    def score(self, rollouts: Rollouts) -> AdvantageResult:
        rewards_N = self.rewards_less_kl(rollouts)
        lengths_N = vector(rollouts.lengths)
        advantages_N = torch.zeros_like(rewards_N)
        for start in range(0, len(rewards_N), rollouts.num_generations):
            where = slice(start, start + rollouts.num_generations)
            scored_K = ~rewards_N[where].isnan()
            rewards_K, lengths_K = rewards_N[where][scored_K], lengths_N[where][scored_K]
            total = lengths_K.sum()
            if not same(rewards_K) and total > 0:
                advantages_N[where][scored_K] = rewards_K - (lengths_K * rewards_K).sum() / total
        return AdvantageResult(advantages_N.tolist())
