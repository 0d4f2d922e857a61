"""Covering arrays: few combinations of options in which every two options of different groups meet."""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any


def pairwise(choices: Sequence[Sequence[Any]], is_possible: Callable[..., bool] = lambda *options: True) -> list[tuple[Any, ...]]:
    """One option of each group of ``choices`` a combination. ``is_possible(*options)``: two options that meet in no possible
    combination need not. Greedy: each combination is one that brings the most pairs that are still missing, and of these one
    of options that were seldom chosen."""
    combinations = [options for options in itertools.product(*choices) if is_possible(*options)]
    numbers: dict[tuple, int] = {}
    pairs = []  # of each combination, as the bits of an integer
    for options in combinations:
        own = 0
        for pair in itertools.combinations(enumerate(options), 2):
            own |= 1 << numbers.setdefault(pair, len(numbers))
        pairs.append(own)
    missing = (1 << len(numbers)) - 1
    chosen, used = [], Counter()
    while missing:
        gains = [(own & missing).bit_count() for own in pairs]
        most = max(gains)
        best = min(
            (i for i, gain in enumerate(gains) if gain == most), key=lambda i: sum(used[o] for o in enumerate(combinations[i]))
        )
        chosen.append(combinations[best])
        used.update(enumerate(combinations[best]))
        missing &= ~pairs[best]
    return chosen
