"""Group relative policy optimization."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from twinkle_research.errors import ConfigError
from twinkle_research.loss.base import LossInputs
from twinkle_research.loss.policy import Objective, clipped_objective
from twinkle_research.loss.policy_loss import PolicyLoss, not_negative, positive


class GRPOLoss(PolicyLoss):
    """PPO's clipped objective on answers whose advantage is relative to their group: a mean over each answer's tokens, then
    over the answers of the step (Shao et al. 2024, DeepSeekMath, arXiv:2402.03300, equation 3). The paper's beta is 0.04.

    ``epsilon``, ``epsilon_high``: the ratio counts within [1 - epsilon, 1 + epsilon_high]; None: the same as epsilon.
    ``dual_clip``: see policy.clipped_objective.
    """

    def __init__(
        self,
        epsilon: float = 0.2,
        epsilon_high: float | None = None,
        beta: float = 0.0,
        entropy_coef: float = 0.0,
        dual_clip: float | None = None,
        normalization: str = "sequence",
        **common: Any,
    ) -> None:
        super().__init__(beta, entropy_coef, normalization=normalization, **common)
        not_negative(epsilon=epsilon, epsilon_high=epsilon_high)
        positive(dual_clip=dual_clip)
        self.epsilon = epsilon
        self.epsilon_high = epsilon if epsilon_high is None else epsilon_high
        self.dual_clip = dual_clip
        if dual_clip is not None and dual_clip <= 1 + self.epsilon_high:
            raise ConfigError(f"loss.dual_clip must be above 1 + epsilon_high = {1 + self.epsilon_high}, got {dual_clip}")

    def objective(self, logprobs_BT: Tensor, log_ratio_BT: Tensor, inputs: LossInputs) -> Objective:
        return clipped_objective(log_ratio_BT.exp(), inputs.advantages, self.epsilon, self.epsilon_high, self.dual_clip)
