"""Keyed orders of rows."""

from __future__ import annotations

import numpy as np

from twinkle_research.randomness import derive_seed


def keyed_permutation(length: int, seed: int, *key: object) -> np.ndarray:
    """A permutation of ``range(length)`` that depends on nothing but its arguments.

    Sorts raw PCG64 draws, whose stream numpy guarantees across versions (that of Generator.permutation it does not).
    """
    draws = np.random.PCG64(derive_seed(seed, *key)).random_raw(length) if length else np.empty(0, np.uint64)
    return np.argsort(draws, kind="stable")
