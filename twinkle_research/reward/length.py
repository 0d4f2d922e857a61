"""Penalties for long completions."""

from __future__ import annotations

from collections.abc import Sequence

from twinkle_research.data_format import Trajectory
from twinkle_research.errors import ConfigError, DataError, nearest
from twinkle_research.reward.base import Reward, row_of

KINDS = ("overlong", "linear")


class LengthReward(Reward):
    """A penalty in [-1, 0] by the number n of sampled tokens (``num_tokens``), the one that stopped it included.

    "overlong" is DAPO's soft overlong punishment (Yu et al. 2025, arXiv:2503.14476, equation 13): 0 up to
    ``max_tokens - cache``, then falling linearly to -1 at ``max_tokens``. "linear" is -n / max_tokens.
    ``cache=None``: a fifth of ``max_tokens``, as in the paper (4,096 of 20,480), rounded up.
    """

    def __init__(self, max_tokens: int | None, cache: int | None = None, kind: str = "overlong"):
        if kind not in KINDS:
            raise ConfigError(f"reward=length: kind={kind!r}; {nearest(kind, KINDS)}")
        if max_tokens is None or max_tokens < 1:
            raise ConfigError(f"reward=length needs max_tokens >= 1, got {max_tokens}")
        if cache is not None and (kind == "linear" or not 0 < cache <= max_tokens):
            why = "has no effect with kind=linear" if kind == "linear" else f"must be in [1, max_tokens={max_tokens}]"
            raise ConfigError(f"reward=length: cache={cache} {why}")
        self.max_tokens = max_tokens
        self.cache = -(-max_tokens // 5) if cache is None else cache
        self.kind = kind

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[float | None]:
        return [self._penalty(_tokens(t)) for t in trajectories]

    def _penalty(self, tokens: int) -> float:
        if self.kind == "linear":
            return 0.0 - min(tokens / self.max_tokens, 1.0)
        over = tokens - (self.max_tokens - self.cache)
        return 0.0 - min(max(over, 0) / self.cache, 1.0)


def _tokens(trajectory: Trajectory) -> int:
    if "num_tokens" not in trajectory:
        raise DataError(f"{row_of(trajectory)}: reward=length needs 'num_tokens', the number of sampled tokens")
    return trajectory["num_tokens"]
