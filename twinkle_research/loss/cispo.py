"""Clipped importance sampling policy optimization."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from twinkle_research.errors import ConfigError
from twinkle_research.loss.base import LossInputs
from twinkle_research.loss.policy import Objective
from twinkle_research.loss.policy_loss import PolicyLoss, not_negative, one_of

CLIPS = ("relative", "absolute")


class CISPOLoss(PolicyLoss):
    """-sg(clip(r)) A log p: the ratio is a weight without gradient, and its clip takes no token's gradient away; a mean over all
    tokens of the step (MiniMax 2025, MiniMax-M1, arXiv:2506.13585, equations 4 and 5).

    ``clip`` says how the two bounds of the weight are meant: ``relative`` to 1, as in the paper, from 1 - epsilon to
    1 + epsilon_high; ``absolute``, as in ScaleRL (arXiv:2510.13786) and TRL, from epsilon to epsilon_high. ``epsilon`` None: no
    lower bound, as in the paper; ``epsilon_high`` None: none above. The paper names no upper bound; 5, here 1 + 4, is TRL's.
    """

    def __init__(
        self,
        epsilon: float | None = None,
        epsilon_high: float | None = 4.0,
        beta: float = 0.0,
        entropy_coef: float = 0.0,
        clip: str = "relative",
        **common: Any,
    ) -> None:
        super().__init__(beta, entropy_coef, **common)
        one_of(clip=(clip, CLIPS))
        not_negative(epsilon=epsilon, epsilon_high=epsilon_high)
        absolute = clip == "absolute"
        self.lowest = 0.0 if epsilon is None else epsilon if absolute else 1 - epsilon
        self.highest = math.inf if epsilon_high is None else epsilon_high if absolute else 1 + epsilon_high
        if not self.lowest <= 1 <= self.highest:
            raise ConfigError(
                f"loss.clip={clip} with epsilon={epsilon} and epsilon_high={epsilon_high} keeps the weight within "
                f"[{self.lowest}, {self.highest}], which leaves out 1, the weight of a policy that has not changed"
            )

    def objective(self, logprobs_BT: Tensor, log_ratio_BT: Tensor, inputs: LossInputs) -> Objective:
        ratio_BT = log_ratio_BT.detach().exp()
        loss_BT = -ratio_BT.clamp(self.lowest, self.highest) * inputs.advantages * logprobs_BT
        return Objective(loss_BT, ratio_BT < self.lowest, ratio_BT > self.highest)
