"""Proximal policy optimization."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from twinkle_research.loss.base import LossInputs, TokenScores
from twinkle_research.loss.grpo import GRPOLoss
from twinkle_research.loss.policy_loss import not_negative, one_of
from twinkle_research.loss.ppo_value import value_terms

AGGREGATIONS = {"token-mean": "token", "seq-mean-token-mean": "sequence"}  # Twinkle's names for the normalization


class PPOLoss(GRPOLoss):
    """The clipped objective (see policy.clipped_objective) and ``value_coef`` times the clipped value loss of a critic on the
    same model (see ppo_value.value_objective), both a mean over the trained tokens of the step (Schulman et al. 2017,
    arXiv:1707.06347, equations 7 and 9). Its advantage is ``advantage=gae``. ``dual_clip``: Ye et al. 2020, arXiv:1912.09729.

    ``value_coef`` 0: no critic. ``value_epsilon`` None: values are not clipped. ``loss_agg_mode``: Twinkle's name for
    ``normalization``: token-mean or seq-mean-token-mean.
    """

    def __init__(
        self,
        loss_agg_mode: str | None = None,
        epsilon: float = 0.2,
        epsilon_high: float | None = None,
        beta: float = 0.0,
        entropy_coef: float = 0.0,
        value_coef: float = 0.0,
        value_epsilon: float | None = 0.2,
        normalization: str = "token",
        **common: Any,
    ) -> None:
        if loss_agg_mode is not None:
            one_of(loss_agg_mode=(loss_agg_mode, AGGREGATIONS))
            normalization = AGGREGATIONS[loss_agg_mode]
        super().__init__(epsilon, epsilon_high, beta, entropy_coef, normalization=normalization, **common)
        not_negative(value_coef=value_coef, value_epsilon=value_epsilon)
        self.value_coef = value_coef
        self.value_epsilon = value_epsilon
        if value_coef:
            self.needs = self.needs | {"values"}
            self.reads = self.reads | {"old_values", "returns"}

    def auxiliary(self, scores: TokenScores, inputs: LossInputs) -> tuple[Tensor | None, dict[str, Tensor]]:
        if not self.value_coef:
            return None, {}
        loss_BT, report = value_terms(scores, inputs, self.value_epsilon, type(self).__name__)
        return self.value_coef * loss_BT, report
