"""The advantage of REINFORCE leave-one-out."""

from __future__ import annotations

from typing import Any

from twinkle_research.advantage.grpo import GRPOAdvantage


class RLOOAdvantage(GRPOAdvantage):
    """The reward less the mean reward of the group's other answers (Ahmadian et al. 2024, arXiv:2402.14740; Kool
    et al. 2019). ``scale``, ``std`` and ``eps`` as in GRPOAdvantage; the paper does not scale."""

    def __init__(self, scale: str = "none", std: str = "sample", eps: float = 1e-8, **common: Any) -> None:
        super().__init__("leave_one_out", scale, std, eps, **common)
