"""Generalized advantage estimation, with a critic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from twinkle_research.advantage.base import (
    STDS,
    Advantage,
    AdvantageResult,
    Rollouts,
    require_choice,
    require_positive,
    require_range,
    vector,
)
from twinkle_research.advantage.tokens import discounted_sums, token_rewards, whitened
from twinkle_research.loss.kl import kl_estimate


class GAEAdvantage(Advantage):
    """A_t = sum over l of (gamma lambda)^l delta_{t+l}, delta_t = r_t + gamma V(s_{t+1}) - V(s_t) (Schulman et al. 2016,
    arXiv:1506.02438, equation 16); the returns are A_t + V(s_t), before ``normalize`` gives the advantages mean 0
    and std 1 over all tokens of the rollout. The reward stands at the last token, the KL penalty at each.

    Only trained tokens count: what tools or users said between two turns is no step of its own.

    The state after the last token has the value ``last_values``, by default 0: the reward judged the answer as it is, so an
    answer that was cut at the length limit is taken to have ended there. Whoever has a critic's value of that state, and wants
    a cut answer to go on, passes it. An answer that nobody could score keeps its values as its returns.
    """

    def __init__(
        self,
        gamma: float = 1.0,
        gae_lambda: float = 0.95,
        normalize: bool = True,
        std: str = "population",
        eps: float = 1e-8,
        **common: Any,
    ) -> None:
        super().__init__(**common)
        require_range("gamma", gamma, 0, 1)
        require_range("gae_lambda", gae_lambda, 0, 1)
        require_positive("eps", eps)
        require_choice("std", std, STDS)
        self.gamma = gamma
        self.gae_lambda = gae_lambda
        self.normalize = normalize
        self.std = std
        self.eps = eps
        self.needs = self.needs | {"values"}

    def score(self, rollouts: Rollouts) -> AdvantageResult:
        rewards_N = self.checked(rollouts)
        penalties = self.kl_penalty(rollouts) if self.kl_coef else [None] * len(rewards_N)
        last = [0.0] * len(rewards_N) if rollouts.last_values is None else rollouts.last_values
        values = rollouts.values
        scored = (~rewards_N.isnan()).nonzero().squeeze(-1).tolist()
        found = []
        for i in scored:
            rewards = token_rewards(float(rewards_N[i]), len(values[i]), penalties[i])
            found.append(vector(self.advantages_of(rewards, values[i], last[i])))
        returns = [list(answer) for answer in values]
        for i, advantages_T in zip(scored, found, strict=True):
            returns[i] = (advantages_T + vector(values[i])).tolist()
        if self.normalize:
            found = whitened(found, True, self.std, self.eps)
        advantages = [[0.0] * len(answer) for answer in values]
        for i, advantages_T in zip(scored, found, strict=True):
            advantages[i] = advantages_T.tolist()
        return AdvantageResult(advantages, returns)

    def advantages_of(self, rewards: Sequence[float], values: Sequence[float], last_value: float = 0.0) -> list[float]:
        """Of one answer, not normalized."""
        after = [*values[1:], last_value][: len(values)]
        deltas = [r + self.gamma * v_next - v for r, v_next, v in zip(rewards, after, values, strict=True)]
        return discounted_sums(deltas, self.gamma * self.gae_lambda)

    def __call__(
        self, rewards: Sequence[Sequence[float]], values: Sequence[Sequence[float]], normalize: bool | None = None
    ) -> tuple[Tensor, Tensor]:
        """Advantages and returns, [N, T] with 0 behind the end of an answer, from the rewards and values of each token."""
        found = [vector(self.advantages_of(r, v)) for r, v in zip(rewards, values, strict=True)]
        returns = [a + vector(v) for a, v in zip(found, values, strict=True)]
        if self.normalize if normalize is None else normalize:
            found = whitened(found, True, self.std, self.eps)
        return pad_sequence(found, batch_first=True), pad_sequence(returns, batch_first=True)

    @staticmethod
    def build_token_rewards(
        rewards: Sequence[float],
        lengths: Sequence[int],
        *,
        old_logps: Sequence[Sequence[float]] | None = None,
        ref_logps: Sequence[Sequence[float]] | None = None,
        kl_coef: float = 0.0,
    ) -> list[list[float]]:
        """Per answer the reward of each token: that of the answer at its last, less ``kl_coef`` (old - ref) at each."""
        built = []
        for i, (reward, length) in enumerate(zip(rewards, lengths, strict=True)):
            penalty = kl_coef * kl_estimate(vector(old_logps[i]), vector(ref_logps[i]), "k1") if kl_coef else None
            built.append(token_rewards(reward, length, penalty))
        return built
