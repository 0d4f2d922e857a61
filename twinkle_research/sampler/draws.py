"""The random numbers that decide tokens, one for each, by position."""

from __future__ import annotations

import numpy as np

_AT_A_TIME = 64


class Uniforms:
    """Numbers in [0, 1) of one completion: number ``n`` depends on the seed and n only."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.Generator(np.random.Philox(key=seed))
        self._numbers: list[float] = []

    def __getitem__(self, n: int) -> float:
        while n >= len(self._numbers):
            self._numbers.extend(self._generator.random(_AT_A_TIME).tolist())
        return self._numbers[n]
