"""REINFORCE leave-one-out."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from twinkle_research.loss.base import LossInputs
from twinkle_research.loss.policy import Objective, clamped, clipped_objective, log_ratio, sequence_mean, sequence_sum
from twinkle_research.loss.policy_loss import PolicyLoss, not_negative


class RLOOLoss(PolicyLoss):
    """The whole answer is one action: -r A with r the ratio of the answer, the product over its tokens, and A its advantage,
    the mean over its tokens if they differ; a mean over the answers of the step (Ahmadian et al. 2024, arXiv:2402.14740,
    section 2; its baseline is ``advantage=rloo``). At r = 1 the gradient is that of -A log p(answer).

    ``epsilon`` (and ``epsilon_high``; None: the same) clips r as PPO does, which the paper finds unnecessary; TRL uses 0.2.
    """

    decides: ClassVar[frozenset[str]] = frozenset({"normalization"})

    def __init__(self, epsilon: float | None = None, epsilon_high: float | None = None, **common: Any) -> None:
        super().__init__(normalization="sequence", **common)
        not_negative(epsilon=epsilon, epsilon_high=epsilon_high)
        self.epsilon = epsilon
        self.epsilon_high = epsilon if epsilon_high is None else epsilon_high

    def log_ratio(self, logprobs_BT: Tensor, inputs: LossInputs) -> Tensor:
        total_BT = sequence_sum(log_ratio(logprobs_BT, inputs.old_logprobs), inputs)
        return clamped(total_BT * inputs.mask, self.log_ratio_clamp)

    def objective(self, logprobs_BT: Tensor, log_ratio_BT: Tensor, inputs: LossInputs) -> Objective:
        advantages_BT = sequence_mean(inputs.advantages, inputs) * inputs.mask
        if self.epsilon is None:
            return Objective(-log_ratio_BT.exp() * advantages_BT)
        return clipped_objective(log_ratio_BT.exp(), advantages_BT, self.epsilon, self.epsilon_high)

    def slope(self, inputs: LossInputs) -> Tensor:
        return -sequence_mean(inputs.advantages, inputs) * inputs.mask
