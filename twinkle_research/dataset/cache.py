"""Encoded rows on disk: written once, opened by every process of this machine, kept for later runs under a key.

    <root>/<key>/header.json                 sizes, fingerprint, what was dropped and why; its own hash
    <root>/<key>/{ids,trained,...}.bin       see store.ARRAYS
    <root>/<key>/dropped.jsonl               one line [source, number, is_line, reason] for each row that was left out
    <root>/<key>.lock                        held by who writes

A folder under its final name is whole: it is written under another name and renamed. Rows that code of the user's takes
part in making are not kept, since no key could tell that the code has changed: their folder is called run-..., the ranks
of one run share it, and it is deleted when all have opened it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

from filelock import FileLock, Timeout

from twinkle_research.cachefolder import cache_root
from twinkle_research.dataset.rows import DroppedRow, Origin, RowReport, Stage
from twinkle_research.dataset.store import ARRAYS, FeatureStore, FeatureWriter, file_name
from twinkle_research.durable import fsync_path
from twinkle_research.errors import UserError

logger = logging.getLogger(__name__)

VERSION = 2
_HEADER, _DROPPED = "header.json", "dropped.jsonl"
# Files whose content is checked at each start. ids and trained, by far the largest, are checked feature by feature when
# they are read, against ``checks``.
_CHECKED = (*(file_name(array) for array in ARRAYS if array not in ("ids", "trained")), _DROPPED)
_RUN_PREFIX = "run-"
_LET_FIRST_SECONDS = 0.5
_STALE_SECONDS = 24 * 3600  # a run's own folder is left behind only by a run that was killed in its first minutes

Encode = Callable[[FeatureWriter, RowReport], None]


class _Damaged(Exception):
    """Why a folder cannot be used."""


class DroppedFile(Sequence[DroppedRow]):
    """The rows that were left out, read from disk when they are asked for."""

    def __init__(self, path: Path, names: Sequence[str], count: int):
        self._file = path.open(encoding="utf-8")  # open, since the folder may be deleted
        self._names = names
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[DroppedRow]:
        self._file.seek(0)
        for line in iter(self._file.readline, ""):
            source, number, is_line, reason = json.loads(line)
            yield DroppedRow(str(Origin(self._names[source], number, is_line)), reason)

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]


@dataclass(frozen=True)
class Encoded:
    """What a folder holds."""

    store: FeatureStore
    dropped: DroppedFile
    warnings: list[str]


@dataclass
class EncodedCache:
    """The folder that holds encoded rows. ``keep=False``: nothing is kept for later runs.

    ``session``: a name that the ranks of one run have in common, so that only one of them on each machine encodes what
    is not kept; they call ``release`` when all have loaded it. Without one, such a folder is deleted at once.
    ``first=False`` lets another process, whose output a person sees, be the one that encodes.
    """

    root: Path = field(default_factory=lambda: cache_root() / "encoded")
    keep: bool = True
    session: str | None = None
    first: bool = True
    _own: list[Path] = field(default_factory=list)

    def load(self, key: str | None, name: str, names: Sequence[str], on_error: str, encode: Encode) -> Encoded:
        """The features under ``key`` (None: not to be kept), made by ``encode`` where they are not there.

        ``name``: of the data set, for messages; ``names``: of its files, as ``Origin.source`` has them. One process
        encodes, the others wait. Raises what ``encode`` raises, and UserError where the folder cannot be written.
        """
        kept = self.keep and key is not None
        folder = self.root / (key if kept else f"{_RUN_PREFIX}{self.session or uuid4().hex}-{len(self._own)}")
        if kept:
            encoded = self._open(folder, name, names) or self._locked_load(folder, name, names, on_error, encode)
        else:
            self._own.append(folder)
            try:
                encoded = self._locked_load(folder, name, names, on_error, encode)
            finally:
                if self.session is None:
                    self.release()
        for text in encoded.warnings:
            logger.warning("%s: %s", name, text)
        return encoded

    def release(self) -> None:
        """Deletes what is not kept. What has been opened stays readable."""
        for folder in self._own:
            shutil.rmtree(folder, ignore_errors=True)
            _lock_path(folder).unlink(missing_ok=True)

    def size(self) -> tuple[int, int]:
        """(number of data sets that are kept, their bytes)."""
        kept = [header.parent for header in self.root.glob(f"*/{_HEADER}") if _is_kept(header.parent)]
        size = 0
        for file in (file for folder in kept for file in folder.glob("*")):
            with suppress(FileNotFoundError):  # somebody clears the folder
                size += file.stat().st_size
        return len(kept), size

    # --- inner --------------------------------------------------------------------------------------------------

    def _locked_load(self, folder: Path, name: str, names: Sequence[str], on_error: str, encode: Encode) -> Encoded:
        if not self.first:
            time.sleep(_LET_FIRST_SECONDS)
        with self._locked(folder):
            encoded = self._open(folder, name, names)  # another process may have made it meanwhile
            if encoded is None:
                self._write(folder, names, on_error, encode)
                encoded = _read(folder, names)
        return encoded

    def _open(self, folder: Path, name: str, names: Sequence[str]) -> Encoded | None:
        if not folder.is_dir():
            return None
        try:
            return _read(folder, names)
        except (_Damaged, OSError) as exc:
            logger.warning("%s: encoded rows in %s are damaged (%s); they are made again", name, folder, exc)
            return None

    @contextmanager
    def _locked(self, folder: Path) -> Iterator[None]:
        with self._errors_named():
            self.root.mkdir(parents=True, exist_ok=True)
            lock = FileLock(_lock_path(folder))
            lock.acquire()
        try:
            self._clean_up(folder)
            yield
        finally:
            lock.release()

    def _clean_up(self, folder: Path) -> None:
        """Deletes what killed processes have left behind."""
        shutil.rmtree(_partial(folder), ignore_errors=True)
        for other in self.root.glob(f"{_RUN_PREFIX}*.lock"):
            if other == _lock_path(folder) or time.time() - other.stat().st_mtime < _STALE_SECONDS:
                continue
            try:
                with FileLock(other, timeout=0):
                    for left in (other.with_suffix(""), _partial(other.with_suffix(""))):
                        shutil.rmtree(left, ignore_errors=True)
                    other.unlink(missing_ok=True)
            except Timeout:
                continue  # somebody is still at it

    def _write(self, folder: Path, names: Sequence[str], on_error: str, encode: Encode) -> None:
        partial = _partial(folder)
        try:
            with self._errors_named(), ExitStack() as stack:
                shutil.rmtree(folder, ignore_errors=True)
                partial.mkdir()
                files = {array: stack.enter_context((partial / file_name(array)).open("w+b")) for array in ARRAYS}
                dropped = stack.enter_context((partial / _DROPPED).open("w", encoding="utf-8"))
                writer = FeatureWriter(files)
                report = RowReport(on_error, lambda origin, reason: _note(dropped, names, origin, reason))
                encode(writer, report)
                dropped.flush()
                header = _header(writer, report, names)
                header["sha256"] = {name: _sha256(partial / name) for name in _CHECKED}
                (partial / _HEADER).write_text(_sealed(header), encoding="utf-8")
                for file in partial.iterdir():
                    fsync_path(file)
                partial.rename(folder)
                fsync_path(self.root)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    @contextmanager
    def _errors_named(self) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            if exc.filename is not None and not Path(exc.filename).is_relative_to(self.root):
                raise  # not about this folder
            raise UserError(
                f"cannot write encoded rows to {self.root}: {exc.strerror or exc}; data.cache_dir, or the environment variable "
                "TWINKLE_CACHE, names another place"
            ) from exc


def _is_kept(folder: Path) -> bool:
    return not folder.name.startswith(_RUN_PREFIX) and not folder.name.endswith(".tmp")


def _lock_path(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")


def _partial(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.tmp")


def _note(file: IO[str], names: Sequence[str], origin: Origin, reason: str) -> None:
    file.write(json.dumps([names.index(origin.source), origin.number, origin.is_line, reason]) + "\n")


def _header(writer: FeatureWriter, report: RowReport, names: Sequence[str]) -> dict[str, Any]:
    for file in writer.files.values():
        file.flush()
    return {
        "version": VERSION,
        "rows": writer.rows,
        "features": writer.features,
        "tokens": writer.tokens,
        "fingerprint": writer.fingerprint(),
        "sources": [[names.index(name), is_line] for name, is_line in writer.sources],
        "stages": [stage.to_json(names) for stage in report.stages],
    }


def _sealed(header: dict[str, Any]) -> str:
    text = json.dumps(header, ensure_ascii=False)
    return json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), "header": text}, ensure_ascii=False)


def _unsealed(path: Path) -> dict[str, Any]:
    try:
        outer = json.loads(path.read_text(encoding="utf-8"))
        text = outer["header"]
        whole = hashlib.sha256(text.encode()).hexdigest() == outer["sha256"]
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise _Damaged(f"{path.name} cannot be read") from exc
    if not whole:
        raise _Damaged(f"{path.name} is not what was written")
    return json.loads(text)


def _read(folder: Path, names: Sequence[str]) -> Encoded:
    """Raises _Damaged, or OSError where a file is missing."""
    header = _unsealed(folder / _HEADER)
    if header["version"] != VERSION:
        raise _Damaged(f"format {header['version']}, expected {VERSION}")
    counts = {"ids": header["tokens"], "trained": header["tokens"], "bounds": header["features"] + 1}
    for array, dtype in ARRAYS.items():
        path = folder / file_name(array)
        size = counts.get(array, header["features"]) * dtype.itemsize
        if path.stat().st_size != size:
            raise _Damaged(f"{path.name} has {path.stat().st_size} bytes instead of {size}")
    for name, expected in header["sha256"].items():
        if _sha256(folder / name) != expected:
            raise _Damaged(f"{name} is not what was written")
    sources = [(names[number], is_line) for number, is_line in header["sources"]]
    store = FeatureStore.mapped(folder, sources, header["rows"], header["fingerprint"])
    stages = [Stage.from_json(stage, names) for stage in header["stages"]]
    dropped = DroppedFile(folder / _DROPPED, names, sum(stage.dropped.total for stage in stages))
    return Encoded(store, dropped, [text for stage in stages for text in stage.warnings()])


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
