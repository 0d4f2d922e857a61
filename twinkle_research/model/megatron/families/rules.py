"""How one parameter of Megatron-Core is made of tensors of a Hugging Face folder. The rows of a family's table are these.

Each rule gives, for a local parameter of ``shape`` on process ``rank`` of the ``size`` that share the matrix, the parts that
lie in it, in the order of the parameter's rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from twinkle_research.model.megatron.pieces import Index, Shape, one_of, whole_index

if TYPE_CHECKING:
    from torch import Tensor

    from twinkle_research.model.megatron.architecture import Architecture


class Part(NamedTuple):
    name: str
    shape: Shape
    index: Index
    view: Callable[[Tensor], Tensor]


def _rows(start: int, stop: int) -> Callable[[Tensor], Tensor]:
    return lambda local: local[start:stop]


@dataclass(frozen=True)
class Whole:
    """The same on all processes that share the layer."""

    name: str

    def parts(self, shape: Shape, rank: int, size: int, architecture: Architecture) -> Iterator[Part]:
        yield Part(self.name, shape, whole_index(shape), _rows(0, shape[0]))


@dataclass(frozen=True)
class Columns:
    """A matrix cut along its inputs (RowParallelLinear)."""

    name: str

    def parts(self, shape: Shape, rank: int, size: int, architecture: Architecture) -> Iterator[Part]:
        yield Part(self.name, *one_of(shape, 1, rank, size), _rows(0, shape[0]))


@dataclass(frozen=True)
class Outputs:
    """A matrix cut along its outputs (ColumnParallelLinear)."""

    name: str

    def parts(self, shape: Shape, rank: int, size: int, architecture: Architecture) -> Iterator[Part]:
        yield Part(self.name, *one_of(shape, 0, rank, size), _rows(0, shape[0]))


@dataclass(frozen=True)
class Gated:
    """Each process's rows of the gate, below them its rows of the other factor (a gated MLP's first matrix or bias)."""

    gate: str
    up: str

    def parts(self, shape: Shape, rank: int, size: int, architecture: Architecture) -> Iterator[Part]:
        half = shape[0] // 2
        for i, name in enumerate((self.gate, self.up)):
            yield Part(name, *one_of((half, *shape[1:]), 0, rank, size), _rows(i * half, (i + 1) * half))


@dataclass(frozen=True)
class QKV:
    """For each group of heads its queries, key and value; cut between groups, or inside them where there are more processes
    than groups (weights or biases)."""

    q: str
    k: str
    v: str

    def parts(self, shape: Shape, rank: int, size: int, architecture: Architecture) -> Iterator[Part]:
        groups, dim, rest = architecture.num_kv_heads, architecture.head_dim, shape[1:]
        queries = architecture.num_heads // groups * dim
        blocks = ((self.q, 0, queries), (self.k, queries, queries + dim), (self.v, queries + dim, queries + 2 * dim))
        if groups % size == 0:
            own = groups // size
            for name, start, stop in blocks:
                part = one_of((own * (stop - start), *rest), 0, rank, size)
                yield Part(name, *part, self._in_groups(own, start, stop))
            return
        first = rank * shape[0]  # row of the whole parameter
        group = first // (queries + 2 * dim)
        offset = first - group * (queries + 2 * dim)  # of this process's rows in their group
        for name, start, stop in blocks:
            top, bottom = max(start, offset), min(stop, offset + shape[0])
            if top < bottom:
                row = group * (stop - start) - start
                index = (slice(row + top, row + bottom), *whole_index(rest))
                yield Part(name, (groups * (stop - start), *rest), index, _rows(top - offset, bottom - offset))

    @staticmethod
    def _in_groups(groups: int, start: int, stop: int) -> Callable[[Tensor], Tensor]:
        return lambda local: local.unflatten(0, (groups, -1))[:, start:stop]


@dataclass(frozen=True)
class Vocabulary:
    """A matrix with a row for each token, padded with zeros to a multiple of the processes. ``tied``: what it is where the
    model has one matrix for input and output (the last pipeline stage then holds it a second time)."""

    name: str
    tied: str = ""

    def parts(self, shape: Shape, rank: int, size: int, architecture: Architecture) -> Iterator[Part]:
        start = min(rank * shape[0], architecture.vocab_size)
        stop = min(start + shape[0], architecture.vocab_size)
        name = self.tied if architecture.tied and self.tied else self.name
        if start < stop:  # else there is only padding here
            index = (slice(start, stop), *whole_index(shape[1:]))
            yield Part(name, (architecture.vocab_size, *shape[1:]), index, _rows(0, stop - start))


Rule = Whole | Columns | Outputs | Gated | QKV | Vocabulary
# (name of Megatron-Core's parameter, what it is made of). ``{expert}`` is an expert's number.
Rows = tuple[tuple[str, Rule], ...]


class Table(NamedTuple):
    """``layer``: names below ``decoder.layers.N.`` there and ``model.layers.N.`` in the folder; the others are whole names."""

    before: Rows
    layer: Rows
    after: Rows
