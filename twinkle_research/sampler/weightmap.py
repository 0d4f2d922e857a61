"""Where each of the trainer's tensors lies in the engine, and whether what lies there is what was sent.

vLLM fuses, slices and pads tensors as its loaders see fit. What they do is not predicted here but observed: each tensor is
loaded once filled with a number of its own, and the engine's parameters are searched for these numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from twinkle_research.errors import UserError

_FIRST_TAG = 0x0100  # bit patterns of bfloat16: normal numbers above 0, exact in float32 as well
_TAGS = 0x7F80 - _FIRST_TAG
_WORD = 8  # bytes
_MODULUS = 2**64
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Region:
    """Rows and leading columns of a parameter of the engine, seen as a matrix."""

    target: str
    start: int
    end: int
    columns: int

    @property
    def numel(self) -> int:
        return (self.end - self.start) * self.columns


def tagged(shapes: Mapping[str, Sequence[int]], device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor of this shape filled with the tensor's tag), float32, of no size in memory."""
    if len(shapes) > _TAGS:
        raise UserError(f"sampler.canary cannot tell the model's {len(shapes)} tensors apart; write sampler.canary=false")
    tags = _tags(len(shapes)).to(device)
    for tag, (name, shape) in zip(tags, shapes.items(), strict=True):
        yield name, tag.expand(tuple(shape))


def _tags(count: int) -> Tensor:
    return torch.arange(_FIRST_TAG, _FIRST_TAG + count, dtype=torch.int16).view(torch.bfloat16).float()


class WeightMap:
    """Made after ``tagged(shapes)`` was loaded into ``targets``, which were all 0 before.

    Raises UserError where a tensor did not arrive as it was sent or, if it is to be ``complete``, a target got nothing.
    """

    def __init__(self, shapes: Mapping[str, Sequence[int]], targets: Mapping[str, Tensor], *, complete: bool) -> None:
        self._shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self._regions: dict[str, list[Region]] = {name: [] for name in shapes}
        self.dtypes: dict[str, torch.dtype] = {}
        self._copies: list[int] = []
        name_of = dict(zip(_tags(len(shapes)).tolist(), shapes, strict=True))
        for target, tensor in targets.items():
            found = list(_find(target, tensor))
            if complete and not found:
                raise UserError(
                    f"no tensor of the trainer reaches the engine's parameter {target}, which would keep what it had; "
                    "sampler.canary=false lets it"
                )
            for tag, region in found:
                if tag not in name_of:
                    raise UserError(_unmappable(target))
                self._regions[name_of[tag]].append(region)
                self.dtypes[name_of[tag]] = tensor.dtype
        self._words = {name: self._word(name) for name in self.dtypes}

    def _word(self, name: str) -> int:
        """Bytes that are summed as one number: 8 where no part of the tensor cuts through them, else an element."""
        size = self.dtypes[name].itemsize
        widths = [_matrix(torch.empty(self._shapes[name], device="meta")).shape[1], *(r.columns for r in self._regions[name])]
        return _WORD if all(width * size % _WORD == 0 for width in widths) else size

    @property
    def counts(self) -> list[int]:
        """Elements of each tensor that lie in this rank's engine."""
        return [sum(region.numel for region in regions) for regions in self._regions.values()]

    def set_counts(self, of_all_ranks: Iterable[list[int]]) -> None:
        """``counts`` of the ranks that share the engine. Together they have each tensor once, or several times; UserError if
        not."""
        totals = [sum(counts) for counts in zip(*of_all_ranks, strict=True)]
        for (name, shape), total in zip(self._shapes.items(), totals, strict=True):
            if total == 0:
                raise UserError(f"the engine has no place for the trainer's tensor {name}: its loader ignores that name")
            if total % prod(shape):
                raise UserError(f"of the {prod(shape)} elements of the trainer's tensor {name} only {total} reach the engine")
        self._copies = [total // prod(shape) for shape, total in zip(self._shapes.values(), totals, strict=True)]

    def checksum(self, name: str, tensor: Tensor) -> Tensor:
        """Of a tensor as it is sent; 0-d, on its device."""
        return checksum(tensor.to(self.dtypes.get(name, tensor.dtype)), self._words.get(name, tensor.element_size()))

    def read(self, targets: Mapping[str, Tensor]) -> list[int]:
        """Checksum of what lies in this rank's engine of each tensor."""
        sums, owners = [], []
        for i, (name, regions) in enumerate(self._regions.items()):
            for region in regions:
                block = _matrix(targets[region.target])[region.start : region.end, : region.columns]
                sums.append(checksum(block, self._words[name]))
                owners.append(i)
        totals = [0] * len(self._regions)
        for i, value in zip(owners, _numbers(sums), strict=True):
            totals[i] = (totals[i] + value) % _MODULUS
        return totals

    def differing(self, sent: Mapping[str, Tensor], of_all_ranks: Iterable[list[int]]) -> list[str]:
        """Tensors that the engine, as the ranks that share it ``read`` it, does not have as they were sent (by checksum)."""
        totals = [sum(values) % _MODULUS for values in zip(*of_all_ranks, strict=True)]
        expected = dict(zip(sent, _numbers(list(sent.values())), strict=True))
        return [
            name
            for name, total, copies in zip(self._regions, totals, self._copies, strict=True)
            if name not in expected or expected[name] * copies % _MODULUS != total
        ] + [name for name in sent if name not in self._regions]


def checksum(tensor: Tensor, word: int) -> Tensor:
    """Sum of the bits, read as words of so many bytes along the rows, modulo 2^64: one pass at the speed of memory. A sum
    over parts is the sum of the whole."""
    tensor = tensor.detach().contiguous()
    if tensor.storage_offset() * tensor.element_size() % word:
        tensor = tensor.clone()
    return _matrix(tensor).view(_INTEGERS[word]).sum(dtype=torch.int64)


def _matrix(tensor: Tensor) -> Tensor:
    return tensor.view(-1, tensor.shape[-1] if tensor.dim() > 1 else 1)


def _numbers(sums: list[Tensor]) -> list[int]:
    return [value % _MODULUS for value in torch.stack(sums).tolist()] if sums else []


def _find(target: str, tensor: Tensor) -> Iterator[tuple[float, Region]]:
    """(tag, where it is) for each block of one tag, between zeros. UserError where there is anything else."""
    if not tensor.is_contiguous():
        raise UserError(_unmappable(target))
    matrix = _matrix(tensor)
    column = matrix[:, 0]
    changes = (column[1:] != column[:-1]).nonzero().squeeze(-1) + 1
    bounds = [0, *changes.tolist(), len(column)]
    for start, end in zip(bounds, bounds[1:], strict=False):
        tag = column[start]
        columns = int((matrix[start] == tag).sum())
        block = matrix[start:end]
        if not ((block[:, :columns] == tag).all() and not block[:, columns:].any()):
            raise UserError(_unmappable(target))
        if tag:  # else padding
            yield float(tag), Region(target, start, end, columns)


def _unmappable(target: str) -> str:
    return (
        f"vLLM stores its parameter {target} in a form that cannot be compared with the trainer's tensors; write "
        "sampler.canary=false to go without the comparison, or sampler=transformers"
    )
