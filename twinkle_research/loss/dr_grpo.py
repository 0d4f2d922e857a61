"""GRPO done right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from twinkle_research.data_format import InputFeature
from twinkle_research.errors import ConfigError
from twinkle_research.loss.grpo import GRPOLoss


class DRGRPOLoss(GRPOLoss):
    """GRPO without its bias towards short right and long wrong answers: tokens are summed, and divided by the step's answers
    times a constant length (Liu et al. 2025, Dr. GRPO, arXiv:2503.20783, listing 1, where the constant is the length limit
    of an answer). Its advantage is ``advantage=dr_grpo``: the reward minus the group's mean, not divided by the std.

    ``max_completion_length``: the constant, in tokens.
    """

    decides: ClassVar[frozenset[str]] = frozenset({"normalization"})

    def __init__(
        self,
        epsilon: float = 0.2,
        beta: float = 0.0,
        max_completion_length: int = 1024,
        epsilon_high: float | None = None,
        **common: Any,
    ) -> None:
        if max_completion_length < 1:
            raise ConfigError(f"loss.max_completion_length must be >= 1, got {max_completion_length}")
        super().__init__(epsilon, epsilon_high, beta, normalization="sequence_sum", **common)
        self.max_completion_length = max_completion_length

    def count(self, features: Sequence[InputFeature]) -> int:
        """Rows with a trained token, times the constant length."""
        return super().count(features) * self.max_completion_length
