"""Group sequence policy optimization."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from twinkle_research.loss.base import LossInputs
from twinkle_research.loss.grpo import GRPOLoss
from twinkle_research.loss.policy import clamped, log_ratio, sequence_mean


class GSPOLoss(GRPOLoss):
    """GRPO with one ratio for the whole answer: the geometric mean of its tokens' ratios (Zheng et al. 2025,
    arXiv:2507.18071, equations 5 to 7; the clip of section 5.1).

    In the form of its GSPO-token (equations 13 and 14), each token's ratio has the value of the answer's and its own
    gradient, so advantages may differ from token to token. Where they do not, value and gradient are those of equation 5.
    """

    def __init__(
        self,
        epsilon: float = 3e-4,
        epsilon_high: float | None = 4e-4,
        beta: float = 0.0,
        entropy_coef: float = 0.0,
        **common: Any,
    ) -> None:
        super().__init__(epsilon, epsilon_high, beta, entropy_coef, **common)

    def log_ratio(self, logprobs_BT: Tensor, inputs: LossInputs) -> Tensor:
        mean_BT = sequence_mean(log_ratio(logprobs_BT, inputs.old_logprobs).detach(), inputs)
        own_BT = log_ratio(logprobs_BT, None)
        return clamped(mean_BT * inputs.mask + own_BT, self.log_ratio_clamp)
