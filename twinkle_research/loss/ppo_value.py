"""The critic's half of proximal policy optimization."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from twinkle_research.errors import UserError
from twinkle_research.loss.base import Loss, LossInputs, LossOutput, TokenScores
from twinkle_research.loss.policy_loss import not_negative, sums_of, where_trained


def value_objective(values_BT: Tensor, old_values_BT: Tensor, returns_BT: Tensor, epsilon: float | None) -> tuple[Tensor, Tensor]:
    """max((v - R)^2, (clip(v, v_old - epsilon, v_old + epsilon) - R)^2) / 2 of each token, and where the second was larger.

    None for ``epsilon``: without the clip. (OpenAI Baselines' ppo2; Huang et al. 2024, arXiv:2403.17031.)
    """
    plain_BT = (values_BT - returns_BT).square()
    if epsilon is None:
        return plain_BT / 2, torch.zeros_like(plain_BT, dtype=torch.bool)
    # Inside the bounds these are the values themselves, to the last bit: a sum of two parts would count as clipped by rounding.
    near_BT = values_BT.clamp(old_values_BT - epsilon, old_values_BT + epsilon)
    clipped_BT = (near_BT - returns_BT).square()
    return torch.maximum(plain_BT, clipped_BT) / 2, clipped_BT > plain_BT


def value_terms(scores: TokenScores, inputs: LossInputs, epsilon: float | None, who: str) -> tuple[Tensor, dict[str, Tensor]]:
    """[B, T] value loss of each token, 0 where not trained, and what to report, [B, T] each.

    Raises UserError where values are to be trained without ``returns`` or ``old_values``; without gradient they count 0.
    """
    given = {"returns": inputs.returns, "old_values": inputs.old_values}
    missing = [name for name, values in given.items() if values is None]
    if missing and scores.values.requires_grad:
        raise UserError(f"{who} needs {' and '.join(missing)}: pass them to forward_backward")
    values_BT = where_trained(scores.values, inputs)
    if missing:
        return torch.zeros_like(values_BT), {"value/mean": values_BT}
    returns_BT, old_BT = (where_trained(given[name], inputs) for name in ("returns", "old_values"))
    loss_BT, clipped_BT = value_objective(values_BT, old_BT, returns_BT, epsilon)
    report = {
        "value/mean": values_BT,
        "value/loss": loss_BT,
        "value/clip": clipped_BT.to(loss_BT.dtype),
        "return/mean": returns_BT,
    }
    return loss_BT, report


class PPOValueLoss(Loss):
    """``value_objective`` as a mean over the trained tokens of the step, for a critic that is trained on its own."""

    needs: ClassVar[frozenset[str]] = frozenset({"values"})
    reads: ClassVar[frozenset[str]] = frozenset({"old_values", "returns"})

    def __init__(self, epsilon: float | None = 0.2) -> None:
        not_negative(epsilon=epsilon)
        self.epsilon = epsilon

    def __call__(self, scores: TokenScores, inputs: LossInputs, normalizer: float) -> LossOutput:
        loss_BT, report = value_terms(scores, inputs, self.epsilon, type(self).__name__)
        return LossOutput(loss_BT.sum() / max(normalizer, 1), inputs.sum_by_sequence(loss_BT.detach()), sums_of(report, inputs))
