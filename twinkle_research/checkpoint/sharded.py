"""A checkpoint that all processes write at once: each its own parts, the main one what stands beside the tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from twinkle_research.checkpoint.folder import drain
from twinkle_research.checkpoint.format import CheckpointWriter
from twinkle_research.checkpoint.names import PARTS
from twinkle_research.checkpoint.parts import PartedTensor, part_metadata, part_stem, parts_index
from twinkle_research.checkpoint.stream import TensorSpec, write_tensors
from twinkle_research.errors import CheckpointError

if TYPE_CHECKING:
    import torch

    from twinkle_research.distributed.runtime import Runtime

T = TypeVar("T")


class ShardedWriter(CheckpointWriter):
    """A CheckpointWriter that also takes tensors in parts. Making one and ``commit`` are collective: what fails in one process
    fails in all.

    ``runtime``: the processes. Where ``commit`` is called in a thread they need a group of their own in it.
    """

    is_collective = True

    def __init__(self, root: str | Path, name: str, *, runtime: Runtime, **about: Any) -> None:
        self._runtime = runtime
        self._failure: OSError | None = None
        make = super().__init__
        self._agreed(lambda: make(root, name, is_writer=runtime.is_main, **about))
        self._agreed(self._check_shared)

    def _check_shared(self) -> None:
        if not self.folder.is_dir():
            raise CheckpointError(
                f"{self.folder} is not there for process {self._runtime.rank}: checkpoint.format=sharded needs a run_dir on a "
                "disk that all nodes share; write checkpoint.format=consolidated"
            )

    def add_parts(self, folder: str, stem: str, tensors: Sequence[PartedTensor], own: Iterable[tuple[str, torch.Tensor]]) -> None:
        """``tensors``: of all processes, the same in each. ``own``: (name, part) of those of which this process writes one, in
        their order; it is consumed in any case, since making it may be collective."""
        rank, count = self._runtime.rank, self._runtime.world_size
        mine = [tensor for tensor in tensors if rank in tensor.parts]
        if self.is_writer:
            self.add_bytes(f"{folder}/{stem}{PARTS}", parts_index(stem, tensors, count))
        if self.deferred:
            copies = [(name, part.detach().to("cpu", copy=True)) for name, part in own]
            self._pending.append(lambda: self._write_parts(folder, stem, mine, drain(copies)))
            return
        own = iter(own)
        try:
            if self._failure is None:
                self._write_parts(folder, stem, mine, own)
        except OSError as error:  # told to the others when all have come to an end
            self._failure = error
        deque(own, maxlen=0)

    def _write_parts(self, folder: str, stem: str, tensors: list[PartedTensor], own: Iterable[tuple[str, torch.Tensor]]) -> None:
        rank = self._runtime.rank
        if not tensors:
            deque(own, maxlen=0)
            return
        where = self.folder / folder
        where.mkdir(parents=True, exist_ok=True)
        specs: list[TensorSpec] = [tensor.part_of(rank) for tensor in tensors]
        name = part_stem(stem, rank, self._runtime.world_size)
        for file, size, digest in write_tensors(where, specs, own, name, metadata=part_metadata(tensors, rank)):
            self._hashes[f"{folder}/{file}"] = (size, digest)

    def commit(self) -> Path:
        try:
            for hashes in self._agreed(self._write_rest):
                self._hashes |= hashes
            if self.is_writer:
                self._give_name()
        except BaseException:
            self.abort()
            raise
        return self.target

    def _write_rest(self) -> dict[str, tuple[int, str]]:
        if self._failure is not None:
            raise self._failure
        self._write_pending()
        return self._hashes

    def _agreed(self, action: Callable[[], T]) -> list[T]:
        """What ``action`` gives in each process."""
        value: T | None = None
        failure: Exception | None = None
        try:
            value = action()
        except Exception as error:
            failure = error
        reports = self._runtime.gather_objects((value, None if failure is None else f"{type(failure).__name__}: {failure}"))
        if failure is not None:
            raise failure
        for rank, (_, message) in enumerate(reports):
            if message is not None:
                raise CheckpointError(f"checkpoint {self.target} could not be written by process {rank}: {message}")
        return [value for value, _ in reports]
