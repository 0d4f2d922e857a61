"""Soft adaptive policy optimization."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from twinkle_research.loss.base import LossInputs
from twinkle_research.loss.policy import Objective
from twinkle_research.loss.policy_loss import PolicyLoss, not_negative, positive


class SAPOLoss(PolicyLoss):
    """-f(r) A with f(r) = sigmoid(tau (r - 1)) * 4 / tau: a gate that falls off smoothly on both sides of r = 1 in the place of
    a clip; tau is ``tau_pos`` where A > 0, else ``tau_neg``. A mean over each answer's tokens, then over answers (Gao et al.
    2025, arXiv:2511.20347, equations 5 and 6).

    ``epsilon``: only for the report, where ratios outside 1 +- epsilon are counted as ratio/clip_low and ratio/clip_high.
    """

    def __init__(
        self,
        epsilon: float = 0.2,
        beta: float = 0.0,
        tau_pos: float = 1.0,
        tau_neg: float = 1.05,
        entropy_coef: float = 0.0,
        normalization: str = "sequence",
        **common: Any,
    ) -> None:
        super().__init__(beta, entropy_coef, normalization=normalization, **common)
        not_negative(epsilon=epsilon)
        positive(tau_pos=tau_pos, tau_neg=tau_neg)
        self.epsilon = epsilon
        self.tau_pos, self.tau_neg = tau_pos, tau_neg

    def objective(self, logprobs_BT: Tensor, log_ratio_BT: Tensor, inputs: LossInputs) -> Objective:
        ratio_BT = log_ratio_BT.exp()
        tau_BT = torch.full_like(ratio_BT, self.tau_neg).masked_fill(inputs.advantages > 0, self.tau_pos)
        gate_BT = torch.sigmoid(tau_BT * (ratio_BT - 1)) * 4 / tau_BT
        return Objective(-gate_BT * inputs.advantages, ratio_BT < 1 - self.epsilon, ratio_BT > 1 + self.epsilon)
