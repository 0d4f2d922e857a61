"""Decoupled clip and dynamic sampling policy optimization."""

from __future__ import annotations

from typing import Any

from twinkle_research.loss.grpo import GRPOLoss


class DAPOLoss(GRPOLoss):
    """GRPO with a higher upper clip, a mean over all tokens of the step, and no KL (Yu et al. 2025, arXiv:2503.14476,
    equation 8). Its dynamic sampling and its penalty for overlong answers are settings of the rollout and the reward."""

    def __init__(
        self, epsilon: float = 0.2, epsilon_high: float | None = 0.28, normalization: str = "token", **common: Any
    ) -> None:
        super().__init__(epsilon, epsilon_high, normalization=normalization, **common)
