"""GRPO's objective as a mean over tokens."""

from __future__ import annotations

from typing import Any

from twinkle_research.loss.grpo import GRPOLoss


class BNPOLoss(GRPOLoss):
    """GRPO's objective, divided by the trained tokens: the form that TRL and Twinkle call bnpo (batch normalised policy
    optimization; not the Beta normalization of arXiv:2506.02864).

    Both of them divide by the tokens of each micro-batch, so that their update depends on how a step is cut. Here the tokens
    are those of the whole optimizer step; where a step is one micro-batch the three agree.
    """

    def __init__(
        self,
        epsilon: float = 0.2,
        epsilon_high: float | None = None,
        beta: float = 0.0,
        entropy_coef: float = 0.0,
        normalization: str = "token",
        **common: Any,
    ) -> None:
        super().__init__(epsilon, epsilon_high, beta, entropy_coef, normalization=normalization, **common)
