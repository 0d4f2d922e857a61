"""REINFORCE, and REINFORCE++."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from twinkle_research.loss.base import LossInputs
from twinkle_research.loss.policy import Objective, clipped_objective
from twinkle_research.loss.policy_loss import PolicyLoss, not_negative


class ReinforceLoss(PolicyLoss):
    """-A log p of each token: the score function estimator (Williams 1992, "Simple Statistical
    Gradient-Following Algorithms"), whatever the policy was that drew the token.

    With ``epsilon`` (and ``epsilon_high``; None: the same) PPO's clipped objective instead, as REINFORCE++ has it, whose
    advantage is ``advantage=reinforce_pp`` (Hu et al. 2025, arXiv:2501.03262).
    """

    def __init__(self, epsilon: float | None = None, epsilon_high: float | None = None, **common: Any) -> None:
        super().__init__(**common)
        not_negative(epsilon=epsilon, epsilon_high=epsilon_high)
        self.uses_ratio = epsilon is not None
        self.epsilon = epsilon
        self.epsilon_high = epsilon if epsilon_high is None else epsilon_high

    def objective(self, logprobs_BT: Tensor, log_ratio_BT: Tensor, inputs: LossInputs) -> Objective:
        if self.epsilon is None:
            return Objective(-inputs.advantages * logprobs_BT)
        return clipped_objective(log_ratio_BT.exp(), inputs.advantages, self.epsilon, self.epsilon_high)
