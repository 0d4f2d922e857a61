"""The advantage of REINFORCE++."""

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
    require_range,
    same,
    vector,
)
from twinkle_research.advantage.tokens import discounted_sums, token_rewards, whitened

BASELINES = ("none", "group")
WHITENINGS = ("token", "sequence", "none")


class ReinforcePPAdvantage(Advantage):
    """A token's discounted later rewards, less the KL penalty of each token, whitened over the whole rollout instead of the
    group (Hu et al. 2025, REINFORCE++, arXiv:2501.03262). ``baseline="group"`` first takes the group's mean reward off, which is
    its variant REINFORCE++-baseline.

    The reward stands at the last token. ``whiten``: mean and std over all ``token``s (an answer counts by its length), over
    answers (``sequence``; each by its first token's value), or ``none``. ``std``: sample (n - 1) or population (n).
    """

    def __init__(
        self,
        baseline: str = "none",
        whiten: str = "token",
        std: str = "population",
        eps: float = 1e-8,
        gamma: float = 1.0,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        require_choice("baseline", baseline, BASELINES)
        require_choice("whiten", whiten, WHITENINGS)
        require_choice("std", std, STDS)
        require_positive("eps", eps)
        require_range("gamma", gamma, 0, 1)
        self.baseline = baseline
        self.whiten = whiten
        self.std = std
        self.eps = eps
        self.gamma = gamma
        self.needs = self.needs | {"lengths"}

    def score(self, rollouts: Rollouts) -> AdvantageResult:
        rewards_N = self.checked(rollouts)
        scored = (~rewards_N.isnan()).nonzero().squeeze(-1).tolist()
        if self.baseline == "group":
            rewards_N = less_group_mean(rewards_N, rollouts.num_generations)
        penalties = self.kl_penalty(rollouts) if self.kl_coef else [None] * len(rewards_N)
        found = []
        for i in scored:
            rewards = token_rewards(float(rewards_N[i]), rollouts.lengths[i], penalties[i])
            found.append(vector(discounted_sums(rewards, self.gamma)))
        if self.whiten != "none":
            found = whitened(found, self.whiten == "token", self.std, self.eps)
        advantages = [[0.0] * length for length in rollouts.lengths]
        for i, values_T in zip(scored, found, strict=True):
            advantages[i] = values_T.tolist()
        return AdvantageResult(advantages)


def less_group_mean(rewards_N: Tensor, num_generations: int) -> Tensor:
    """[N] each reward less the mean of its group's scored ones; exactly 0 where they are all the same."""
    centred_N = rewards_N.clone()
    for rewards_K in centred_N.view(-1, num_generations):
        scored_K = ~rewards_K.isnan()
        found_K = rewards_K[scored_K]
        rewards_K[scored_K] = torch.zeros_like(found_K) if same(found_K) else found_K - found_K.mean()
    return centred_N
