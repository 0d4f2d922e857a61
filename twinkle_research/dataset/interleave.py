"""In which order the sources of a mixture take turns."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import gcd, lcm

import numpy as np

from twinkle_research.errors import ConfigError, DataError, nearest

STOPS = ("first_exhausted", "all_exhausted")
_MAX_ROWS = 2**31 - 1


def interleaving(weights: Sequence[float], rows: Sequence[int], stop: str = "first_exhausted") -> np.ndarray:
    """Which source each row of an epoch comes from, int32 [rows of the epoch].

    R. Tijdeman, "The chairman assignment problem", Discrete Mathematics 32 (1980): of the sources that are far enough
    behind their share, the one is taken that would be the first to fall a whole row behind. No count is then ever off by
    more than 1 - 1 / (2k - 2) rows, for k sources. In whole numbers, so the same everywhere.
    """
    if stop not in STOPS:
        raise ConfigError(f"stop={stop!r}: {nearest(stop, STOPS)}")
    if len(weights) != len(rows):
        raise ConfigError(f"a mixture needs one weight for each of its {len(rows)} sources, got {len(weights)}")
    parts = whole_parts(weights)
    total, k = sum(parts), len(parts)
    if k == 1:
        return np.zeros(rows[0], np.int32)
    # A source has given its r rows after at most (r + 1) * total / part rows of the mixture.
    ends = [-(-(count + 1) * total // part) for part, count in zip(parts, rows, strict=True)]
    length = min(ends) + 1 if stop == "first_exhausted" else max(ends)
    if length > _MAX_ROWS:
        raise DataError(
            f"an epoch of this mixture would have about {length} rows; with weights so far apart choose stop=first_exhausted"
        )
    pattern = np.resize(_period(parts, min(total, length)), length)
    places = [np.flatnonzero(pattern == source) for source in range(k)]
    if stop == "first_exhausted":
        length = min(int(place[count]) for place, count in zip(places, rows, strict=True) if len(place) > count)
    else:
        length = max(int(place[count - 1]) + 1 for place, count in zip(places, rows, strict=True))
    return pattern[:length]


def whole_parts(weights: Sequence[float]) -> list[int]:
    """The weights as whole numbers without a common divisor; 0.7 and 0.3 are 7 and 3."""
    for weight in weights:
        if not 0 < weight < float("inf"):
            raise ConfigError(f"a weight must be > 0, got {weight}")
    fractions = [Fraction(str(weight)) for weight in weights]
    denominator = lcm(*(fraction.denominator for fraction in fractions))
    parts = [int(fraction * denominator) for fraction in fractions]
    return [part // gcd(*parts) for part in parts]


def _period(parts: Sequence[int], length: int) -> np.ndarray:
    """The first ``length`` choices; after sum(parts) of them they repeat.

    ``behind[i]``: what source i is owed, times ``unit``, after this step's share is added and before the choice.
    """
    k, total = len(parts), sum(parts)
    unit = (2 * k - 2) * total
    shares = [(2 * k - 2) * part for part in parts]
    behind = [0] * k
    choices = np.empty(length, np.int32)
    for step in range(length):
        best, best_wait = -1, 0
        for i in range(k):
            behind[i] += shares[i]
            if behind[i] >= total:  # one (2k - 2)-th of a row
                wait = unit - total - behind[i]  # divided by shares[i]: in steps
                if best < 0 or wait * shares[best] < best_wait * shares[i]:
                    best, best_wait = i, wait
        behind[best] -= unit
        choices[step] = best
    return choices
