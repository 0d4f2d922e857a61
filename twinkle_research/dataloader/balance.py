"""Rows of a global batch dealt to ranks so that all have about as many tokens."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def deal(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """For each rank the numbers of its rows, ascending. All rows are dealt, and no rank has two more than another.

    The balanced largest differencing method (Michiels, Korst, Aarts and van Leeuwen, "Performance ratios for the
    differencing method applied to the balanced number partitioning problem", STACS 2003). Rows are sorted by length and
    cut into groups of ``ranks``; each group alone is a way to give every rank one row. The two ways with the largest
    difference between ranks are joined, the longest of one with the shortest of the other, until one is left. Joining
    never makes a difference larger, so at the end that between ranks is at most the largest within a group.
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    ways: list[tuple[int, int, list[tuple[int, list[int]]]]] = []  # (-difference, number, [(tokens, rows)], most first)
    for number, start in enumerate(range(0, len(order), ranks)):
        rows = order[start : start + ranks]
        shares = [(int(lengths[row]), [row]) for row in rows] + [(0, [])] * (ranks - len(rows))
        ways.append((shares[-1][0] - shares[0][0], number, shares))
    heapq.heapify(ways)
    while len(ways) > 1:
        (_, number, first), (_, _, second) = heapq.heappop(ways), heapq.heappop(ways)
        joined = [(a + c, b + d) for (a, b), (c, d) in zip(first, reversed(second), strict=True)]
        joined.sort(key=lambda share: (-share[0], share[1]))
        heapq.heappush(ways, (joined[-1][0] - joined[0][0], number, joined))
    shares = ways[0][2] if ways else [(0, [])] * ranks
    return [sorted(rows) for _, rows in shares]
