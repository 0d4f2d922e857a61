"""Pieces of the advantages that differ from token to token. Ragged: one list or tensor of trained tokens for each answer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from twinkle_research.advantage.base import same, spread


def token_rewards(reward: float, length: int, penalty_T: Tensor | None = None) -> list[float]:
    """The reward at the last token, less the penalty of each token."""
    rewards = [0.0] * length if penalty_T is None else (-penalty_T).tolist()
    if len(rewards) != length:
        raise ValueError(f"an answer of {length} trained tokens has {len(rewards)} log-probabilities")
    if rewards:
        rewards[-1] += reward
    return rewards


def discounted_sums(values: Sequence[float], discount: float) -> list[float]:
    """At each place the sum of it and all later ones, discounted by ``discount`` a place."""
    sums, total = [], 0.0
    for value in reversed(values):
        total = value + discount * total
        sums.append(total)
    return sums[::-1]


def whitened(answers: Sequence[Tensor], by_token: bool, std: str, eps: float) -> list[Tensor]:
    """Less the mean and divided by std + ``eps`` of all tokens, or of all answers (of each its first token). Exactly 0 where
    there is nothing to tell apart."""
    everything = torch.cat([a if by_token else a[:1] for a in answers]) if answers else torch.zeros(0)
    if same(everything):
        return [a - everything[:1] if by_token else torch.zeros_like(a) for a in answers]
    return [(a - everything.mean()) / (spread(everything, std) + eps) for a in answers]
