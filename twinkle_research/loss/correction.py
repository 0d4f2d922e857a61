"""Weights for tokens that were not drawn from the policy that is trained: the sampler's numerics differ from the trainer's.

w = trainer's probability / sampler's, before any update on these rows; of each token, or of the whole answer (the product
over its tokens). Weights carry no gradient and multiply the policy's part of the loss.

    tis_token, tis_sequence   w cut to [low, high]: truncated importance sampling (Ionides 2008; for RL with two engines
                              Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training")
    mis_token, mis_sequence   w inside [low, high], 0 outside: masked importance sampling (Liu et al. 2025, "When Speed Kills
                              Stability"; TRL's *_mask)
    icepop                    mis_token with a bound on both sides (Ling Team 2025, arXiv:2510.18855)
"""

from __future__ import annotations

import torch
from torch import Tensor

from twinkle_research.loss.base import LossInputs

MAX_LOG_WEIGHT = 20.0  # e^20 = 5e8: still finite in float32 where there is no upper bound


def correction_weights(mode: str, log_gap_BT: Tensor, inputs: LossInputs, low: float | None, high: float | None) -> Tensor:
    """[B, T] without gradient. ``log_gap_BT``: log of w of each token, 0 where not trained."""
    log_gap_BT = log_gap_BT.detach()
    if mode.endswith("_sequence"):
        log_gap_BT = inputs.sum_by_sequence(log_gap_BT)[inputs.sequence_ids]
    weights_BT = log_gap_BT.clamp(-MAX_LOG_WEIGHT, MAX_LOG_WEIGHT).exp()
    if mode.startswith("tis"):
        return weights_BT.clamp(low, high)
    inside_BT = torch.ones_like(weights_BT, dtype=torch.bool)
    if low is not None:
        inside_BT &= weights_BT >= low
    if high is not None:
        inside_BT &= weights_BT <= high
    return weights_BT.where(inside_BT, 0.0)


def off_policy_mask(logprobs_BT: Tensor, behaviour_BT: Tensor, advantages_BT: Tensor, inputs: LossInputs, threshold: float):
    """[B, T] 0 on answers to forget that the policy has already left behind, else 1: those with a negative advantage whose mean
    over tokens of log behaviour - log policy is above ``threshold`` (DeepSeek-V3.2, arXiv:2512.02556, equation 9)."""
    gap = inputs.sum_by_sequence(behaviour_BT - logprobs_BT.detach()) / inputs.sum_by_sequence(inputs.mask).clamp(min=1)
    keep_BT = (advantages_BT >= 0) | (gap <= threshold)[inputs.sequence_ids]
    return keep_BT.to(logprobs_BT.dtype)
