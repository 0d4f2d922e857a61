"""Which part of which tensor of a Hugging Face folder lies where in a parameter of this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]
Index = tuple[slice, ...]


def _all_of(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True)
class Piece:
    """A part of one tensor of a folder, and where it lies in a tensor of the shape of this process's parameter (the
    parameter itself, its gradient, a moment, a copy).

    ``name``, ``shape``: of the whole tensor in the folder. ``index``: one slice, with explicit start and stop, for each
    dimension: the part. ``view``: from the local tensor to the view of it that holds the part, its elements in the part's
    order. ``place`` sorts the tensors of a model; those of the same place are sorted by name.
    """

    name: str
    shape: Shape
    index: Index
    view: Callable[[Tensor], Tensor] = _all_of
    place: tuple[int, ...] = ()

    @classmethod
    def whole(cls, name: str, shape: Shape, place: tuple[int, ...] = ()) -> Piece:
        """The local tensor is the whole tensor."""
        return cls(name, tuple(shape), whole_index(shape), place=place)

    @property
    def size(self) -> Shape:
        """Shape of the part."""
        return tuple(part.stop - part.start for part in self.index)

    @property
    def is_whole(self) -> bool:
        return self.size == self.shape

    def read(self, local: Tensor) -> Tensor:
        """The part, out of ``local``; a view of it where that is possible."""
        return self.view(local).reshape(self.size)

    def write(self, local: Tensor, part: Tensor) -> None:
        """Puts the part into ``local``."""
        view = self.view(local)
        view.copy_(part.reshape(view.shape))


def whole_index(shape: Shape) -> Index:
    return tuple(slice(0, size) for size in shape)


def one_of(shape: Shape, dim: int, rank: int, size: int) -> tuple[Shape, Index]:
    """(shape of the whole, index of the part) where ``shape`` is part ``rank`` of ``size`` equal ones along ``dim``."""
    whole = tuple(n * size if i == dim else n for i, n in enumerate(shape))
    index = tuple(slice(rank * n, (rank + 1) * n) if i == dim else slice(0, n) for i, n in enumerate(shape))
    return whole, index
