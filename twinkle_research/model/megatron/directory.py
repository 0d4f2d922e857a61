"""Who holds which part of every tensor of the model; with it tensors go from a folder to all processes' parameters and back.

It knows nothing of what the tensors are: weights, gradients, moments and copies go through it by the same pieces. Nothing
is computed on the way, so bits stay what they are.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from twinkle_research.checkpoint.parts import Box, PartedTensor, tiling_problem
from twinkle_research.checkpoint.stream import TensorFolder, TensorSpec
from twinkle_research.errors import CheckpointError, ConfigError, similar
from twinkle_research.model.megatron.pieces import Piece, Shape

if TYPE_CHECKING:
    from twinkle_research.distributed.runtime import Runtime
    from twinkle_research.model.megatron.mesh import Mesh

BUCKET_BYTES = 64 << 20
_ALONE = 1 << 20  # what is at least as large is not copied together with others before it is sent

TensorOf = Callable[[str], Tensor]  # from a name in memory
_Entry = tuple[str, Shape, Box, tuple[int, ...]]  # name, shape, part, place


@dataclass
class _Held:
    """One tensor. ``owners``: for each part the lowest rank that holds it."""

    shape: Shape
    place: tuple[int, ...]
    owners: dict[Box, int] = field(default_factory=dict)
    everywhere: bool = False  # whole on each rank


class Directory:
    """``pieces``: for each name in memory what lies in that parameter of this process. Gathered here once: collective.

    ``shapes``: name in the folder -> whole shape, of all tensors of all processes, in the model's order. Raises ConfigError
    where the parts of a tensor do not make it up exactly. ``bucket_bytes`` bounds what ``stream`` takes.
    """

    def __init__(self, mesh: Mesh, pieces: Mapping[str, Sequence[Piece]], bucket_bytes: int = BUCKET_BYTES) -> None:
        self._runtime = mesh.runtime
        self._pieces = {name: list(own) for name, own in pieces.items()}
        self._bucket_bytes = bucket_bytes
        self._own: dict[str, list[tuple[str, Piece]]] = {}
        for memory, own in self._pieces.items():
            for piece in own:
                self._own.setdefault(piece.name, []).append((memory, piece))
        listings, self._replicas = _gathered(self._runtime, self._pieces)
        held = _merged(listings)
        self._held = dict(sorted(held.items(), key=lambda item: (item[1].place, _natural(item[0]))))
        for name, tensor in self._held.items():
            if problem := tiling_problem(tensor.shape, [(f"rank {rank}", box) for box, rank in tensor.owners.items()]):
                raise ConfigError(f"tensor {name} of shape {tensor.shape}: {problem}")
        self.shapes: dict[str, Shape] = {name: tensor.shape for name, tensor in self._held.items()}

    def __contains__(self, memory: str) -> bool:
        return memory in self._pieces

    def tensors_of(self, memory: str) -> list[str]:
        """The tensors of which the parameter ``memory`` of this process holds something."""
        return list(dict.fromkeys(piece.name for piece in self._pieces[memory]))

    # --- to whole tensors ---------------------------------------------------------------------------------------

    def dtypes(self, tensor_of: TensorOf, names: Iterable[str] | None = None) -> dict[str, torch.dtype]:
        """Of the whole tensors. Collective."""
        names = self._chosen(names)
        tensor_of = _remembering_one(tensor_of)
        own = {name: tensor_of(self._own[name][0][0]).dtype for name in names if name in self._own}
        kinds = set(own.values())
        # There are many names and usually one dtype.
        reports = self._runtime.gather_objects(kinds.pop() if len(kinds) == 1 else own)
        found = {}
        for name in names:
            of_owners = {
                report if isinstance(report, torch.dtype) else report[name]
                for report in (reports[owner] for owner in self._held[name].owners.values())
            }
            if len(of_owners) > 1:
                raise ValueError(f"tensor {name} has several dtypes on its ranks: {sorted(map(str, of_owners))}")
            found[name] = of_owners.pop()
        return found

    def specs(self, dtypes: Mapping[str, torch.dtype], suffix: str = "") -> list[TensorSpec]:
        """Of what ``stream(..., dtypes)`` gives, with ``suffix`` behind each name."""
        return [
            TensorSpec(name + suffix, str(dtypes[name]).removeprefix("torch."), self.shapes[name])
            for name in self._chosen(dtypes)
        ]

    def stream(
        self, tensor_of: TensorOf, names: Iterable[str] | None = None, dtypes: Mapping[str, torch.dtype] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor) in the model's order on all ranks, on the device of the run. Collective: each rank goes to
        the end.

        ``tensor_of``: what lies where the parameter does. It is called on each rank that holds a part (replicas too, so it
        may be collective among them), once for tensors that follow each other. ``names``: all by default, or those that
        ``dtypes`` (``self.dtypes`` by default) gives.

        A tensor may be a view of a parameter: copy it to keep it or write to it. Beside what is held already a rank needs
        ``bucket_bytes``, or the largest tensor and half of that, while the consumer lets go of the tensors.
        """
        if dtypes is None:
            dtypes = self.dtypes(tensor_of, names)
        read = _remembering_one(tensor_of)
        for bucket in self._buckets(self._chosen(dtypes if names is None else names), dtypes):
            if self._held[bucket[0]].everywhere:
                yield bucket[0], self._local(bucket[0], read)
            else:
                yield from self._exchange(bucket, dtypes[bucket[0]], read)

    def _chosen(self, names: Iterable[str] | None) -> list[str]:
        if names is None:
            return list(self._held)
        wanted = set(names)
        if unknown := sorted(wanted - self._held.keys()):
            raise ValueError(f"tensor {unknown[0]} is not part of this model{similar(unknown[0], self._held)}")
        return [name for name in self._held if name in wanted]

    def _buckets(self, names: list[str], dtypes: Mapping[str, torch.dtype]) -> Iterator[list[str]]:
        """Tensors that follow each other, of one dtype; those that are whole everywhere each alone."""
        bucket: list[str] = []
        size = 0
        for name in names:
            alone = self._held[name].everywhere
            nbytes = math.prod(self.shapes[name]) * dtypes[name].itemsize
            if bucket and (alone or dtypes[name] != dtypes[bucket[0]] or size + nbytes > self._bucket_bytes // 2):
                yield bucket
                bucket, size = [], 0
            if alone:
                yield [name]
            else:
                bucket.append(name)
                size += nbytes
        if bucket:
            yield bucket

    @torch.no_grad()
    def _local(self, name: str, tensor_of: TensorOf) -> Tensor:
        memory, piece = next(own for own in self._own[name] if own[1].is_whole)
        return piece.read(tensor_of(memory).detach())

    @torch.no_grad()
    def _exchange(self, names: list[str], dtype: torch.dtype, tensor_of: TensorOf) -> Iterator[tuple[str, Tensor]]:
        sizes = [math.prod(self.shapes[name]) for name in names]
        flat = torch.empty(sum(sizes), dtype=dtype, device=self._runtime.device)
        wholes = {name: part.view(self.shapes[name]) for name, part in zip(names, flat.split(sizes), strict=True)}
        del flat
        for name in names:
            for memory, piece in self._own.get(name, ()):
                local = tensor_of(memory)
                if local.dtype != dtype:
                    raise ValueError(f"{name} was announced as {dtype}, but {memory} is {local.dtype}")
                wholes[name][piece.index].copy_(piece.read(local.detach()))
        sent: dict[int, list[Tensor]] = {}
        for name in names:
            for box, owner in self._held[name].owners.items():
                sent.setdefault(owner, []).append(wholes[name][_index(box)])
        for owner in sorted(sent):
            self._broadcast(sent[owner], owner)
        sent.clear()
        for name in names:
            yield name, wholes.pop(name)

    def _broadcast(self, parts: list[Tensor], owner: int) -> None:
        """Fills ``parts`` on all ranks from those of ``owner``."""
        waiting: list[Tensor] = []
        room = limit = max(self._bucket_bytes // 2, 1)
        for part in parts:
            if part.is_contiguous() and part.nbytes >= min(_ALONE, limit):
                dist.broadcast(part, src=owner)
                continue
            for rows in part.split(max(1, limit // max(part[:1].nbytes, 1))):
                if rows.nbytes > room:
                    self._send_together(waiting, owner)
                    waiting, room = [], limit
                waiting.append(rows)
                room -= rows.nbytes
        self._send_together(waiting, owner)

    def _send_together(self, parts: list[Tensor], owner: int) -> None:
        if not parts:
            return
        flat = parts[0].new_empty(sum(part.numel() for part in parts))
        pairs = list(zip(flat.split([part.numel() for part in parts]), parts, strict=True))
        if self._runtime.rank == owner:
            for packed, part in pairs:
                packed.view(part.shape).copy_(part)
        dist.broadcast(flat, src=owner)
        if self._runtime.rank != owner:
            for packed, part in pairs:
                part.copy_(packed.view(part.shape))

    # --- in parts -----------------------------------------------------------------------------------------------

    def parted(self, dtypes: Mapping[str, torch.dtype], suffix: str = "", *, spread: bool) -> list[PartedTensor]:
        """Who writes which part of the tensors that ``dtypes`` names, the same answer on all ranks: the lowest rank that holds
        it. ``spread``: of the ranks that hold all the same as that one, the one that has least to write yet."""
        burden = [0] * self._runtime.world_size
        found = []
        for spec in self.specs(dtypes, suffix):
            parts: dict[int, Box] = {}
            for box, owner in self._held[spec.name.removesuffix(suffix)].owners.items():
                candidates = self._replicas[owner] if spread else [owner]
                rank = min(candidates, key=burden.__getitem__)
                if rank in parts:
                    raise ValueError(f"rank {rank} holds two parts of tensor {spec.name}")
                parts[rank] = box
                burden[rank] += PartedTensor(spec, parts).part_of(rank).nbytes
            found.append(PartedTensor(spec, parts))
        return found

    def own_parts(self, tensor_of: TensorOf, parted: Iterable[PartedTensor], suffix: str = "") -> Iterator[tuple[str, Tensor]]:
        """(name, part) of what this rank is to write, in the order of ``parted``. ``tensor_of``: as for ``stream``; called for
        what others write, too. Each rank goes to the end."""
        read, rank = _remembering_one(tensor_of), self._runtime.rank
        for tensor in parted:
            wanted = tensor.parts.get(rank)
            for memory, piece in self._own.get(tensor.spec.name.removesuffix(suffix), ()):
                local = read(memory)
                if wanted == _box(piece):
                    wanted = None
                    yield tensor.spec.name, piece.read(local.detach())

    # --- from a folder ------------------------------------------------------------------------------------------

    def check(
        self, folder: TensorFolder, names: Iterable[str] | None = None, suffix: str = "",
        is_ignored: Callable[[str], bool] = lambda name: False,
    ) -> None:  # fmt: skip
        """Raises CheckpointError for a tensor that is missing in ``folder``, has another shape, or that is no part of what
        is loaded. On disk ``suffix`` stands behind each name; tensors with other endings are not looked at."""
        chosen = self._chosen(names)
        expected = {name + suffix for name in chosen}
        for name in chosen:
            if name + suffix not in folder:
                raise CheckpointError(f"{folder.path}: tensor {name}{suffix} is missing")
            found = folder.spec(name + suffix).shape
            if found != self.shapes[name]:
                raise CheckpointError(
                    f"tensor {name}{suffix} has shape {found} in {folder.path}, {self.shapes[name]} in the model"
                )
        for name in sorted(set(folder) - expected):
            if name.endswith(suffix) and not is_ignored(name):
                raise CheckpointError(f"{folder.path}: tensor {name} is not part of this model{similar(name, expected)}")

    def load(
        self, folder: TensorFolder, tensor_of: TensorOf, names: Iterable[str] | None = None, suffix: str = "",
        is_ignored: Callable[[str], bool] = lambda name: False,
    ) -> None:  # fmt: skip
        """Fills what ``tensor_of`` gives for each parameter of this process that consists of ``names`` (default: all).
        Raises as ``check``, before the first is written to. No rank waits for another."""
        self.check(folder, names, suffix, is_ignored)
        for memory in self.loaded(names):
            self.fill(folder, memory, tensor_of(memory), suffix)

    def loaded(self, names: Iterable[str] | None = None) -> list[str]:
        """The parameters of this process that consist of ``names``. ValueError where one does only in part."""
        wanted = set(self._chosen(names))
        found = []
        for memory, own in self._pieces.items():
            inside = [piece.name in wanted for piece in own]
            if any(inside) and not all(inside):
                raise ValueError(f"{memory} holds {own[inside.index(False)].name} too, which is not among the tensors given")
            if all(inside):
                found.append(memory)
        return found

    @torch.no_grad()
    def fill(self, folder: TensorFolder, memory: str, target: Tensor, suffix: str = "") -> None:
        """Reads all pieces of one parameter into ``target``, one after the other; what no piece covers (padding) becomes 0.
        Nothing else is read. Values are rounded where ``target`` is narrower."""
        own = self._pieces[memory]
        if sum(math.prod(piece.size) for piece in own) != target.numel():
            target.zero_()
        for piece in own:
            piece.write(target, folder.region(piece.name + suffix, piece.index))


# --- what all ranks hold ------------------------------------------------------------------------------------------------


def _gathered(runtime: Runtime, pieces: Mapping[str, Sequence[Piece]]) -> tuple[list[list[_Entry] | None], dict[int, list[int]]]:
    """What each rank holds, None for a rank that holds the same as a lower one (its replica); and who holds the same as each of
    the others."""
    own = sorted((p.name, tuple(p.shape), _box(p), tuple(p.place)) for held in pieces.values() for p in held)
    digests = runtime.gather_objects(hashlib.sha256(repr(own).encode()).hexdigest())
    listings = runtime.gather_objects(own if digests.index(digests[runtime.rank]) == runtime.rank else None)
    replicas: dict[int, list[int]] = {}
    for rank, digest in enumerate(digests):
        replicas.setdefault(digests.index(digest), []).append(rank)
    return listings, replicas


def _merged(listings: list[list[_Entry] | None]) -> dict[str, _Held]:
    found: dict[str, _Held] = {}
    whole_on: dict[str, int] = {}
    for rank, listing in enumerate(listings):
        wholes = set()
        for name, shape, box, place in listing or ():
            held = found.setdefault(name, _Held(shape, place))
            if held.shape != shape:
                raise ConfigError(f"tensor {name} has shape {held.shape} on one rank and {shape} on another")
            held.place = min(held.place, place)
            held.owners.setdefault(box, rank)
            if box == tuple((0, size) for size in shape):
                wholes.add(name)
        for name in wholes:
            whole_on[name] = whole_on.get(name, 0) + 1
    different = sum(listing is not None for listing in listings)
    for name, held in found.items():
        held.everywhere = whole_on.get(name) == different
    return found


def _box(piece: Piece) -> Box:
    return tuple((part.start, part.stop) for part in piece.index)


def _index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts layer 10 behind layer 9."""
    return [(int(word), "") if word.isdigit() else (0, word) for word in re.split(r"(\d+)", name)]


def _remembering_one(tensor_of: TensorOf) -> TensorOf:
    last: list[tuple[str, Tensor]] = []

    def read(memory: str) -> Tensor:
        if not last or last[0][0] != memory:
            last.clear()  # before the next one exists
            last.append((memory, tensor_of(memory)))
        return last[0][1]

    return read
