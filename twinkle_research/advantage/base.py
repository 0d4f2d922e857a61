"""What an advantage is: a pure function of a whole rollout, on the CPU in float64, the same on every rank."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from twinkle_research.errors import ConfigError, UserError, nearest
from twinkle_research.loss.kl import kl_estimate

REWARD_KL = ("k1", "k2", "k3")
STDS = ("sample", "population")


@dataclass
class Rollouts:
    """All answers of a rollout, over all ranks, in prompt order; the answers to one prompt stand together.

    N answers; those of a prompt are ``num_generations`` in turn. The per-token lists hold the answer's trained tokens.
    """

    rewards: Sequence[float | None]  # None or NaN: nobody could score it
    num_generations: int = 1
    lengths: Sequence[int] | None = None  # trained tokens
    old_logps: Sequence[Sequence[float]] | None = None  # of the policy that is trained, before any update on these
    ref_logps: Sequence[Sequence[float]] | None = None  # of the reference
    values: Sequence[Sequence[float]] | None = None  # of a critic, for the state before each token
    last_values: Sequence[float] | None = None  # of a critic, for the state after the last token; None: 0 (the answer ended)


@dataclass
class AdvantageResult:
    """``advantages`` and ``returns`` go to ``forward_backward`` as they are: a number for each answer, or one for each of its
    trained tokens."""

    advantages: list[float] | list[list[float]]
    returns: list[list[float]] | None = None  # what a critic's values are to be


class Advantage(ABC):
    """Base of all advantages. ``needs`` names the optional fields of Rollouts that it reads.

    An answer that nobody could score (reward None or NaN) has advantage 0 and takes no part in any mean or std. A group whose
    scored answers have all the same reward, or a single one, has advantages of exactly 0.

    ``kl_coef`` c takes c times the KL to the reference off the reward, token by token (``kl_estimator``: see loss/kl.py), as a
    number that carries no gradient.
    """

    def __init__(self, kl_coef: float = 0.0, kl_estimator: str = "k1") -> None:
        require_range("kl_coef", kl_coef, 0, math.inf)
        require_choice("kl_estimator", kl_estimator, REWARD_KL)
        self.kl_coef = kl_coef
        self.kl_estimator = kl_estimator
        self.needs = frozenset({"old_logps", "ref_logps"} if kl_coef else ())

    @abstractmethod
    def score(self, rollouts: Rollouts) -> AdvantageResult:
        """Raises UserError where the rollouts lack what ``needs`` names, ValueError where lengths do not fit."""

    def checked(self, rollouts: Rollouts) -> Tensor:
        """[N] float64 rewards, NaN where nobody could score, after checks of what is there and how long it is."""
        rewards_N = as_rewards(rollouts.rewards)
        missing = sorted(name for name in self.needs if getattr(rollouts, name) is None)
        if missing:
            raise UserError(f"{type(self).__name__} needs {' and '.join(missing)}")
        if rollouts.num_generations < 1 or len(rewards_N) % rollouts.num_generations:
            raise ValueError(f"{len(rewards_N)} rewards are not whole groups of num_generations={rollouts.num_generations}")
        for name in ("lengths", "old_logps", "ref_logps", "values", "last_values"):
            given = getattr(rollouts, name)
            if given is not None and len(given) != len(rewards_N):
                raise ValueError(f"{name} has {len(given)} entries for {len(rewards_N)} rewards")
        return rewards_N

    def kl_penalty(self, rollouts: Rollouts) -> list[Tensor]:
        """Per answer what is taken off the reward at each trained token."""
        penalties = []
        for i, (old, ref) in enumerate(zip(rollouts.old_logps, rollouts.ref_logps, strict=True)):
            if len(old) != len(ref):
                raise ValueError(f"answer {i} has {len(old)} old_logps, but {len(ref)} ref_logps")
            penalties.append(self.kl_coef * kl_estimate(vector(old), vector(ref), self.kl_estimator))
        return penalties

    def rewards_less_kl(self, rollouts: Rollouts) -> Tensor:
        """[N] the reward of each answer, less the penalty of all its tokens."""
        rewards_N = self.checked(rollouts)
        if self.kl_coef:
            rewards_N = rewards_N - torch.stack([penalty.sum() for penalty in self.kl_penalty(rollouts)])
        return rewards_N


def as_rewards(rewards: Any) -> Tensor:
    """[N] float64 with NaN for None. Of a table (several rewards for each answer) the sum of each row."""
    if not isinstance(rewards, Tensor):
        rewards = [[_number(r) for r in row] if isinstance(row, (list, tuple)) else _number(row) for row in rewards]
    rewards_N = torch.as_tensor(rewards, dtype=torch.float64)
    rewards_N = rewards_N.sum(-1) if rewards_N.ndim == 2 else rewards_N
    if rewards_N.isinf().any():
        raise ValueError(f"reward {int(rewards_N.isinf().nonzero()[0])} is infinite")
    return rewards_N


def _number(reward: float | None) -> float:
    return math.nan if reward is None else float(reward)


def vector(values: Sequence[float]) -> Tensor:
    return torch.as_tensor(values, dtype=torch.float64)


def same(values: Tensor) -> bool:
    """Whether there is no difference to learn from, be it only for rounding in a mean."""
    return values.numel() == 0 or bool(values.min() == values.max())


def spread(values: Tensor, kind: str) -> Tensor:
    """Standard deviation, 0 for a single value; ``kind`` sample (divided by n - 1) or population (by n)."""
    if len(values) < 2:
        return values.new_zeros(())
    return values.std(correction=1 if kind == "sample" else 0)


# --- options ----------------------------------------------------------------------------------------------------------


def require_choice(name: str, value: str, valid: Sequence[str]) -> None:
    if value not in valid:
        raise ConfigError(f"advantage.{name}={value!r}; {nearest(value, valid)}")


def require_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high or not math.isfinite(value):
        raise ConfigError(f"advantage.{name} must be in [{low}, {high}], got {value}")


def require_positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ConfigError(f"advantage.{name} must be finite and > 0, got {value}")
