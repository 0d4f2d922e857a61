"""Who sends how much to whom."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cache

from twinkle_research.distributed.gpus import Hardware

KINDS = ("tensor", "context", "expert", "pipeline", "data", "sampler")


@cache
def _where(size: int, stride: int, nproc: int) -> tuple[int, int]:
    """(fewest members on a machine that has some, machines) of the group that lies worst. Groups follow one another: where they
    do not divide a machine some of them lie in two."""
    block = size * stride
    if nproc % stride == 0 and (nproc % block == 0 or block % nproc == 0):
        here = max(1, min(size, nproc // stride))
        return here, -(-size // here)
    worst = (size, 1)
    for first in range(0, math.lcm(block, nproc), block):
        for start in range(first, first + stride):
            found = Counter((start + i * stride) // nproc for i in range(size))
            worst = min(worst, (min(found.values()), len(found)))
    return worst


@dataclass(frozen=True)
class Group:
    """``size`` processes, each ``stride`` ranks from the next, on machines of ``nproc`` processes."""

    size: int
    stride: int
    nproc: int

    @property
    def here(self) -> int:
        """Of them on one machine, at least."""
        return _where(self.size, self.stride, self.nproc)[0]

    @property
    def machines(self) -> int:
        return _where(self.size, self.stride, self.nproc)[1]


@dataclass(frozen=True)
class Flow:
    """All collectives of one kind in a step: ``size`` is their bytes on the busiest process. ``op``: all_reduce, all_gather,
    reduce_scatter, all_to_all, send or broadcast. ``hidden``: behind the passes."""

    kind: str
    op: str
    size: float
    group: Group
    hidden: bool = False

    @property
    def node(self) -> float:
        """Bytes that a process sends within its machine, at least."""
        n, here = self.size, self.group.here
        if self.op == "send":
            return 0.0 if self.group.machines > 1 else n
        if self.op == "all_to_all":
            return n * (here - 1) / self.group.size
        return n * _rounds(self.op) * (here - 1) / here

    @property
    def network(self) -> float:
        """Bytes that a process sends to other machines, at least: each machine needs what it lacks once, through all adapters
        of those of its processes that are in the group."""
        n, machines, here = self.size, self.group.machines, self.group.here
        if machines == 1:
            return 0.0
        if self.op == "send":
            return n
        if self.op == "all_to_all":
            return n * (self.group.size - here) / self.group.size
        return n * _rounds(self.op) * (self.group.size - here) / self.group.size / here

    def seconds(self, hardware: Hardware) -> float:
        return self.node / hardware.node + self.network / hardware.network


def _rounds(op: str) -> int:
    """An all-reduce is a reduce-scatter and an all-gather (Patarasuk & Yuan 2009)."""
    return 2 if op == "all_reduce" else 1
