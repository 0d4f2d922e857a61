"""Policy gradient with an importance weight."""

from __future__ import annotations

from torch import Tensor

from twinkle_research.loss.base import LossInputs
from twinkle_research.loss.policy import Objective
from twinkle_research.loss.policy_loss import PolicyLoss


class ImportanceSamplingLoss(PolicyLoss):
    """-r A of each token, without a clip (the objective of Schulman et al. 2015, TRPO, arXiv:1502.05477, equation 14; Tinker's
    ``importance_sampling``, which sums over tokens where this is a mean)."""

    def objective(self, logprobs_BT: Tensor, log_ratio_BT: Tensor, inputs: LossInputs) -> Objective:
        return Objective(-log_ratio_BT.exp() * inputs.advantages)
