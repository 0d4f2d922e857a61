"""A folder that appears whole or not at all: filled under a temporary name, flushed to the disk, then renamed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinkle_research.checkpoint.files import make_folders, remove_folder, write_new
from twinkle_research.checkpoint.names import REPLACED, TMP, TRASH, safe_relative
from twinkle_research.checkpoint.stream import TensorSpec, plan_shards, write_tensors
from twinkle_research.durable import fsync_path

if TYPE_CHECKING:
    import torch

MAX_SHARD_BYTES = 5_000_000_000
ADAPTER_STEM = "adapter_model"


def shard_bytes(stem: str) -> int | None:
    """The largest file of a set of tensors in a checkpoint. PEFT knows a single one only."""
    return None if stem == ADAPTER_STEM else MAX_SHARD_BYTES


class FolderWriter:
    """A folder that appears whole or not at all. As a context manager it commits at the end, or removes what it wrote.

    ``is_writer=False`` makes every call a no-op that still consumes its tensors, so that all ranks run the same code
    (producing a tensor may be collective). ``deferred=True`` copies the tensors instead of writing them; ``commit``,
    possibly in another thread, writes the copies.
    """

    is_collective = False  # whether all ranks must make one and commit it

    def __init__(self, target: str | Path, *, is_writer: bool = True, deferred: bool = False) -> None:
        self.target = Path(target)
        self.folder = self.target.with_name(self.target.name + TMP)
        self.is_writer = is_writer
        self.deferred = deferred
        self._hashes: dict[str, tuple[int, str]] = {}
        self._pending: list[Callable[[], None]] = []
        if is_writer:
            make_folders(self.target.parent)
            recover(self.target)
            self.folder.mkdir()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if kind is None:
            self.commit()
        else:
            self.abort()

    # --- what goes in -------------------------------------------------------------------------------------------------

    def add_tensors(
        self,
        folder: str,
        specs: Sequence[TensorSpec],
        tensors: Iterable[tuple[str, torch.Tensor]],
        *,
        stem: str = "model",
        max_shard_bytes: int | None = MAX_SHARD_BYTES,
    ) -> None:
        """Streams ``tensors`` ((name, tensor) pairs in the order of ``specs``, any device) into ``folder``.

        Files are ``<stem>.safetensors``, or shards and an index as transformers reads them where they would be larger
        than ``max_shard_bytes``. Only the tensor being written is held. ValueError: a tensor is not what its spec says.
        """
        if not self.is_writer:
            deque(tensors, maxlen=0)
        elif self.deferred:
            copies = [(name, tensor.detach().to("cpu", copy=True)) for name, tensor in tensors]
            self._pending.append(lambda: self._write_tensors(folder, specs, drain(copies), stem, max_shard_bytes))
        else:
            self._write_tensors(folder, specs, tensors, stem, max_shard_bytes)

    def _write_tensors(self, folder: str, specs: Sequence[TensorSpec], tensors, stem: str, max_shard_bytes: int | None) -> None:
        where = self.path(folder)
        prefix = f"{folder}/" if folder else ""
        files = []
        for file_name, size, digest in write_tensors(where, specs, tensors, stem, max_shard_bytes):
            self._hashes[prefix + file_name] = (size, digest)
            files.append(file_name)
        if len(files) > 1:
            weight_map = {}
            for file_name, shard in plan_shards(specs, stem, max_shard_bytes).items():
                weight_map.update({spec.name: file_name for spec in shard})
            index = {"metadata": {"total_size": sum(spec.nbytes for spec in specs)}, "weight_map": weight_map}
            self.add_json(f"{prefix}{stem}.safetensors.index.json", index)

    def add_json(self, name: str, value: Any) -> None:
        """Writes ``value`` as strict JSON (ValueError for NaN and infinities)."""
        self.add_bytes(name, (json.dumps(value, indent=1, allow_nan=False, ensure_ascii=False) + "\n").encode())

    def add_bytes(self, name: str, data: bytes) -> None:
        if self.is_writer:
            name = safe_relative(name, "checkpoint")
            parent, _, _ = name.rpartition("/")
            self.path(parent)
            write_new(self.folder / name, data)
            self._hashes[name] = (len(data), hashlib.sha256(data).hexdigest())

    def add_files(self, folder: str, write: Callable[[Path], Any]) -> None:
        """Calls ``write(path of folder)``, on the writing rank only: ``add_files("model", tokenizer.save_pretrained)``."""
        if self.is_writer:
            write(self.path(folder))

    def path(self, folder: str = "") -> Path:
        """The folder ``folder`` of what is being written, made if needed. Only the writing rank has one."""
        if not self.is_writer:
            raise RuntimeError("this rank does not write the checkpoint")
        path = self.folder / safe_relative(folder, "checkpoint") if folder else self.folder
        path.mkdir(parents=True, exist_ok=True)
        return path

    # --- how it ends --------------------------------------------------------------------------------------------------

    def commit(self) -> Path:
        """Writes what was deferred, flushes everything to the disk and gives the folder its name."""
        if self.is_writer:
            try:
                self._write_pending()
                self._give_name()
            except BaseException:
                self.abort()
                raise
        return self.target

    def _write_pending(self) -> None:
        for job in self._pending:
            job()
        self._pending.clear()

    def _give_name(self) -> None:
        self._finish()
        self._flush()
        self._rename()

    def abort(self) -> None:
        """Removes what was written. An earlier folder of the same name is untouched."""
        self._pending.clear()
        if self.is_writer and self.folder.exists():
            shutil.rmtree(self.folder, ignore_errors=True)  # the error that led here matters more

    def _finish(self) -> None:
        """Adds what can only be written last: nothing here, the manifest in a checkpoint."""

    def written_files(self) -> list[str]:
        seen = {path.relative_to(self.folder).as_posix() for path in self.folder.rglob("*") if not path.is_dir()}
        return sorted(seen | self._hashes.keys())  # a disk in a network may show late what another rank has written

    def _flush(self) -> None:
        for name in self.written_files():
            if name not in self._hashes:  # written by someone else through path()
                fsync_path(self.folder / name)
        folders = [path for path in self.folder.rglob("*") if path.is_dir()]
        for folder in sorted(folders, key=lambda path: -len(path.parts)):
            fsync_path(folder)
        fsync_path(self.folder)

    def _rename(self) -> None:
        replaced = self.target.with_name(self.target.name + REPLACED)
        if self.target.exists():  # the same name again: at every moment one of the two is whole
            os.rename(self.target, replaced)
            fsync_path(self.target.parent)
        os.rename(self.folder, self.target)
        fsync_path(self.target.parent)
        if replaced.exists():
            remove_folder(replaced)


def recover(target: Path) -> None:
    """Undoes what a crash left of a save or deletion of ``target``. Only for the process that may write there."""
    unfinished, replaced, trash = (target.with_name(target.name + suffix) for suffix in (TMP, REPLACED, TRASH))
    if replaced.exists() and not target.exists():
        os.rename(replaced, target)
        fsync_path(target.parent)
    for leftover in (unfinished, replaced, trash):
        if leftover.exists():
            remove_folder(leftover)


def drain(items: list) -> Iterable:
    """Yields the items, dropping each once it is used."""
    items.reverse()
    while items:
        yield items.pop()
