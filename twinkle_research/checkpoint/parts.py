"""Tensors of which each process has written the parts that it had.

    model.part-00001-of-00004.safetensors ...    the parts of one process, under the names of the whole tensors
    model.parts.json                             {"files": [...], "tensors": {name: [dtype, shape, [[file, start, stop], ...]]}}

The files are those of PyTorch's distributed checkpoints in safetensors (HuggingFaceStorageWriter with save_distributed): where a
part lies in its tensor stands in the header too, so that torch.distributed.checkpoint reads such a folder. Megatron-Core's own
format is another one, whose metadata and common state are pickles.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinkle_research.checkpoint.files import CHUNK
from twinkle_research.checkpoint.names import PARTS, UnsafeCheckpoint, refuse_pickle, resolve_inside, safe_relative
from twinkle_research.checkpoint.stream import TensorFolder, TensorSpec, read_header
from twinkle_research.errors import CheckpointError

if TYPE_CHECKING:
    import torch

Box = tuple[tuple[int, int], ...]  # start and stop for each dimension


@dataclass(frozen=True)
class PartedTensor:
    """A whole tensor and which process writes what of it: number of the process -> part."""

    spec: TensorSpec
    parts: Mapping[int, Box]

    def part_of(self, rank: int) -> TensorSpec:
        """What the process ``rank`` writes."""
        return _part(self.spec, self.parts[rank])


def _part(spec: TensorSpec, box: Box) -> TensorSpec:
    return TensorSpec(spec.name, spec.dtype, tuple(stop - start for start, stop in box))


def part_stem(stem: str, rank: int, count: int) -> str:
    return f"{stem}.part-{rank + 1:05d}-of-{count:05d}"


def part_metadata(tensors: Iterable[PartedTensor], rank: int) -> dict[str, str]:
    """Of the header of a file, as torch.distributed.checkpoint reads it."""
    offsets = {tensor.spec.name: {"saved_offsets": [start for start, _ in tensor.parts[rank]]} for tensor in tensors}
    return {"DCP_SHARDING_INFO": json.dumps(offsets, separators=(",", ":")), "DCP_VERSION": "1.0"}


def parts_index(stem: str, tensors: Sequence[PartedTensor], count: int) -> bytes:
    """Content of the file ``<stem>.parts.json``; ``count``: of the processes."""
    ranks = sorted({rank for tensor in tensors for rank in tensor.parts})
    numbers = {rank: number for number, rank in enumerate(ranks)}
    entries = {
        tensor.spec.name: [
            tensor.spec.dtype,
            tensor.spec.shape,
            [[numbers[rank], [a for a, _ in box], [b for _, b in box]] for rank, box in tensor.parts.items()],
        ]
        for tensor in tensors
    }
    files = [f"{part_stem(stem, rank, count)}.safetensors" for rank in ranks]
    return (json.dumps({"files": files, "tensors": entries}, separators=(",", ":"), ensure_ascii=False) + "\n").encode()


class PartedFolder(TensorFolder):
    """A TensorFolder whose tensors lie in parts. What is read is put together in memory of its own, where columns are cut through
    a buffer of a few megabytes; parts that it has nothing of are not looked at."""

    def __init__(self, path: str | Path, stem: str) -> None:
        self.path, self.stem = Path(path), stem
        self._specs: dict[str, TensorSpec] = {}
        self._parts: dict[str, list[tuple[str, Box]]] = {}
        self._in_file: dict[str, dict[str, TensorSpec]] = {}  # file -> what it has
        self._begins: dict[str, dict[str, int]] = {}  # file -> tensor -> where its bytes begin; of files that were opened
        self._buffer: torch.Tensor | None = None
        where = resolve_inside(self.path, f"{stem}{PARTS}", str(self.path))
        try:
            index = json.loads(where.read_text(encoding="utf-8"))
            names = [str(name) for name in index["files"]]
            for name in names:
                refuse_pickle(name, str(where))
                if "/" in safe_relative(name, str(where)):
                    raise UnsafeCheckpoint(f"{where}: '{name}' is refused: parts lie beside their index")
            for name, (dtype, shape, parts) in index["tensors"].items():
                self._add(TensorSpec(name, dtype, tuple(map(_size, shape))), names, parts)
        except OSError as error:
            raise CheckpointError(f"{where}: cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
            raise CheckpointError(f"{where}: damaged index of parts: {error}") from error

    def _add(self, spec: TensorSpec, files: list[str], parts: list[Any]) -> None:
        self._specs[spec.name] = spec
        own = self._parts[spec.name] = [
            (files[_size(file)], tuple((_size(a), _size(b)) for a, b in zip(start, stop, strict=True)))
            for file, start, stop in parts
        ]
        if problem := tiling_problem(spec.shape, own):
            raise ValueError(f"tensor {spec.name} of shape {spec.shape}: {problem}")
        for file, box in own:
            if self._in_file.setdefault(file, {}).setdefault(spec.name, part := _part(spec, box)) is not part:
                raise ValueError(f"{file} has two parts of tensor {spec.name}")

    @property
    def files(self) -> list[str]:
        return sorted(self._in_file)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.region(name, tuple(slice(0, size) for size in self.spec(name).shape))

    def part(self, name: str, rows: slice) -> torch.Tensor:
        shape = self.spec(name).shape
        start, stop, _ = rows.indices(shape[0]) if shape else (0, 0, 1)
        return self.region(name, tuple(slice(start, stop) if i == 0 else slice(0, size) for i, size in enumerate(shape)))

    def region(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        import torch

        spec = self.spec(name)
        target = torch.empty([part.stop - part.start for part in index], dtype=getattr(torch, spec.dtype))
        for file, box in self._parts[name]:
            common = [(max(a, part.start), min(b, part.stop)) for (a, b), part in zip(box, index, strict=True)]
            if all(a < b for a, b in common):
                into = tuple(slice(a - part.start, b - part.start) for (a, b), part in zip(common, index, strict=True))
                inside = tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(common, box, strict=True))
                self._read(file, spec, box, inside, target[into])
        return target

    def _read(self, file: str, spec: TensorSpec, box: Box, inside: tuple[slice, ...], target: torch.Tensor) -> None:
        """Fills ``target`` with the elements ``inside`` of the part ``box`` that ``file`` has of a tensor."""
        import torch

        shape = tuple(stop - start for start, stop in box)
        if not shape:  # of one element
            shape, inside, target = (1,), (slice(0, 1),), target.unsqueeze(0)
        row_bytes = TensorSpec(spec.name, spec.dtype, shape[1:]).nbytes
        rows, at_once = inside[0], max(1, CHUNK // row_bytes)
        begin = self._opened(file)[spec.name]
        with open(resolve_inside(self.path, file, str(self.path)), "rb", buffering=0) as opened:
            opened.seek(begin + rows.start * row_bytes)
            if target.shape[1:] == shape[1:] and target.is_contiguous():
                _fill(opened, memoryview(target.view(-1).view(torch.uint8).numpy()), self.path / file)
                return
            buffer = self._buffer_of(at_once * row_bytes)
            for row in range(rows.start, rows.stop, at_once):
                count = min(at_once, rows.stop - row)
                _fill(opened, memoryview(buffer.numpy())[: count * row_bytes], self.path / file)
                done = row - rows.start
                read = buffer[: count * row_bytes].view(target.dtype).view(count, *shape[1:])
                target[done : done + count].copy_(read[(slice(None), *inside[1:])])

    def _buffer_of(self, size: int) -> torch.Tensor:
        """Bytes to read into, where columns are cut; kept, so that the allocator need not find them anew for each tensor."""
        import torch

        if self._buffer is None or len(self._buffer) < size:
            self._buffer = torch.empty(size, dtype=torch.uint8)
        return self._buffer

    def _opened(self, file: str) -> dict[str, int]:
        if file not in self._begins:
            path = resolve_inside(self.path, file, str(self.path))
            found, expected = read_header(path), self._in_file[file]
            if wrong := sorted(n for n in found.keys() | expected.keys() if found.get(n) != expected.get(n)):
                raise CheckpointError(f"{path}: tensor {wrong[0]} is not what {self.stem}{PARTS} says of this file")
            begin = path.stat().st_size - sum(spec.nbytes for spec in found.values())
            begins = self._begins[file] = {}
            for name, spec in found.items():  # in the order of the file, without holes
                begins[name] = begin
                begin += spec.nbytes
        return self._begins[file]


def open_tensors(path: str | Path, stem: str | None = None) -> TensorFolder:
    """The tensors of a folder of a checkpoint, whole or in parts."""
    folder = Path(path)
    if stem is None:
        stems = [entry.name.removesuffix(PARTS) for entry in sorted(folder.glob(f"*{PARTS}"))]
        stem = stems[0] if len(stems) == 1 else None
    if stem is not None and (folder / f"{stem}{PARTS}").is_file():
        return PartedFolder(folder, stem)
    return TensorFolder(folder, stem)


def _fill(file: Any, data: memoryview, path: Path) -> None:
    while len(data):
        count = file.readinto(data)
        if not count:
            raise CheckpointError(f"{path}: it is cut")
        data = data[count:]


def _size(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no size")
    return value


def tiling_problem(shape: Sequence[int], held: Sequence[tuple[str, Box]]) -> str | None:
    """What keeps these parts (who holds it, where it lies) from making up a tensor of ``shape``, each element once."""
    for i, (owner, box) in enumerate(held):
        if not all(0 <= start < stop <= size for (start, stop), size in zip(box, shape, strict=True)):
            return f"{owner} holds {box}, which is no part of it"
        for other, earlier in held[:i]:
            if all(a < d and c < b for (a, b), (c, d) in zip(box, earlier, strict=True)):
                return f"{other} and {owner} hold parts that overlap"
    count = sum(math.prod(stop - start for start, stop in box) for _, box in held)
    whole = math.prod(shape)
    return None if count == whole else f"all together hold {count} of its {whole} elements"
