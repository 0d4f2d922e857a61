"""What the policy losses are made of: ratios, the clipped objective, what a token's loss counts.

All tensors are [B, T]; positions that are not trained hold 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from twinkle_research.loss.base import LossInputs


@dataclass
class Objective:
    """Loss of each token, and which tokens lie where the clip has taken their gradient away (for the report)."""

    loss_BT: Tensor
    clipped_low_BT: Tensor | None = None  # bool
    clipped_high_BT: Tensor | None = None  # bool


def log_ratio(logprobs_BT: Tensor, old_logprobs_BT: Tensor | None) -> Tensor:
    """log(policy / old policy). Without ``old_logprobs_BT`` the two are the same: exactly 0, with gradient."""
    return logprobs_BT - (logprobs_BT.detach() if old_logprobs_BT is None else old_logprobs_BT)


def clamped(log_ratio_BT: Tensor, clamp: float | None) -> Tensor:
    """Within [-clamp, clamp], so that its exponential stays finite; no gradient outside."""
    return log_ratio_BT if clamp is None else log_ratio_BT.clamp(-clamp, clamp)


def sequence_mean(values_BT: Tensor, inputs: LossInputs) -> Tensor:
    """[B, T]: at each position the mean over the trained positions of its sequence."""
    means = inputs.sum_by_sequence(values_BT) / inputs.sum_by_sequence(inputs.mask).clamp(min=1)
    return means[inputs.sequence_ids]


def sequence_sum(values_BT: Tensor, inputs: LossInputs) -> Tensor:
    """[B, T]: at each position the sum over the trained positions of its sequence."""
    return inputs.sum_by_sequence(values_BT)[inputs.sequence_ids]


def clipped_objective(
    ratio_BT: Tensor, advantages_BT: Tensor, low: float, high: float, dual_clip: float | None = None
) -> Objective:
    """-min(r A, clip(r, 1 - low, 1 + high) A) (Schulman et al. 2017, PPO, arXiv:1707.06347, equation 7).

    ``dual_clip`` c: where A < 0 the loss is at most -c A (Ye et al. 2020, arXiv:1912.09729).
    """
    loss_BT = -torch.minimum(ratio_BT * advantages_BT, ratio_BT.clamp(1 - low, 1 + high) * advantages_BT)
    negative_BT = advantages_BT < 0
    too_high_BT = (ratio_BT > 1 + high) & (advantages_BT > 0)
    if dual_clip is not None:
        beyond_BT = (ratio_BT > dual_clip) & negative_BT
        loss_BT = torch.where(beyond_BT, -dual_clip * advantages_BT, loss_BT)
        too_high_BT |= beyond_BT
    return Objective(loss_BT, (ratio_BT < 1 - low) & negative_BT, too_high_BT)


def token_weights(normalization: str, inputs: LossInputs) -> Tensor:
    """[B, T]: what each token's loss counts before the division by the step's normaliser.

    ``token``: 1, to be divided by the step's trained tokens. ``sequence``: 1 / trained tokens of its sequence, to be divided by
    the step's sequences. ``sequence_sum``: 1, to be divided by the step's sequences, or by those times a constant length.
    """
    if normalization == "sequence":
        return inputs.mask / inputs.sum_by_sequence(inputs.mask).clamp(min=1)[inputs.sequence_ids]
    return inputs.mask
