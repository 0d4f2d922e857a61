"""Features as flat arrays, in memory or in files: 5 bytes a token, 30 a feature.

Of files the arrays with one entry a feature are mapped into memory; tokens, by far the most, are read when a feature is
asked for. Mapped too, each page that was ever touched would count as this process's memory until the system needs it
(and a single fault may map a megabyte).
"""

from __future__ import annotations

import hashlib
import mmap
import os
import zlib
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from twinkle_research.data_format import InputFeature
from twinkle_research.dataset.encoding import EncodedChunk, RowKey
from twinkle_research.dataset.rows import Origin
from twinkle_research.errors import DataError
from twinkle_research.template.base import to_feature
from twinkle_research.template.tokens import Tokens

# One file or buffer each. Little-endian, as is every machine that torch runs on.
ARRAYS = {
    "ids": np.dtype(np.int32),  # [tokens]
    "trained": np.dtype(bool),  # [tokens]
    "bounds": np.dtype(np.int64),  # [features + 1]: feature i has the tokens from bounds[i] to bounds[i + 1]
    "rows": np.dtype(np.int64),  # [features]: number of the row that a feature is made of, dropped rows counted
    "sources": np.dtype(np.uint16),  # [features]: which of ``FeatureStore.sources`` it comes from
    "numbers": np.dtype(np.int64),  # [features]: its line or number there
    "checks": np.dtype(np.uint32),  # [features]: CRC-32 of its tokens, see ``_check``
}
_TOKENS = ("ids", "trained")
_MAX_SOURCES = 2**16
_BLOCK = 1 << 20

SourceNames = Sequence[tuple[str, bool]]  # (name, whether its rows are numbered by line)


class FeatureStore:
    """``rows``: how many rows the features come from. Lists are made when a feature is asked for.

    ``fingerprint``: SHA-256 over bounds, ids and trained.
    """

    def __init__(self, arrays: dict[str, Any], sources: SourceNames, rows: int, fingerprint: str, folder: str | Path = "memory"):
        self.ids, self.trained, self.bounds = arrays["ids"], arrays["trained"], arrays["bounds"]
        self.row_numbers = arrays["rows"]
        self._source_of, self._number = arrays["sources"], arrays["numbers"]
        self._checks = arrays["checks"]
        self.sources = sources
        self.rows = rows
        self.fingerprint = fingerprint
        self.folder = folder

    @classmethod
    def mapped(cls, folder: Path, sources: SourceNames, rows: int, fingerprint: str) -> FeatureStore:
        """Over the files of ``folder``, which may be deleted from then on."""
        arrays: dict[str, Any] = {}
        for name, dtype in ARRAYS.items():
            path = folder / file_name(name)
            arrays[name] = FileArray(path, dtype) if name in _TOKENS else _mapped(path, dtype)
        return cls(arrays, sources, rows, fingerprint, folder)

    def __len__(self) -> int:
        return len(self.row_numbers)

    def feature(self, index: int) -> InputFeature:
        """Raises DataError where its tokens are not those that were written."""
        part = slice(int(self.bounds[index]), int(self.bounds[index + 1]))
        ids, trained = self.ids[part], self.trained[part]
        if _check(ids, trained) != self._checks[index]:
            raise DataError(
                f"{self.origin(index)}: its encoded row in {self.folder} is damaged: its tokens are not what was "
                "written. Delete that folder; the next start then encodes its rows again"
            )
        return to_feature(Tokens(ids, trained), str(self.origin(index)))

    def origin(self, index: int) -> Origin:
        name, is_line = self.sources[self._source_of[index]]
        return Origin(name, int(self._number[index]), is_line)

    def lengths(self, numbers: np.ndarray) -> np.ndarray:
        """Tokens of features ``numbers``, int64."""
        return self.bounds[numbers + 1] - self.bounds[numbers]


class FileArray:
    """A file of numbers, read a slice at a time. Threads and forked processes may share it."""

    def __init__(self, path: Path, dtype: np.dtype):
        self._file = path.open("rb", buffering=0)
        self._dtype = dtype

    def __getitem__(self, part: slice) -> np.ndarray:
        size = (part.stop - part.start) * self._dtype.itemsize
        raw = os.pread(self._file.fileno(), size, part.start * self._dtype.itemsize)
        if len(raw) != size:
            raise DataError(f"{self._file.name}: ends too early; it was cut while it was in use")
        return np.frombuffer(raw, self._dtype)


def _mapped(path: Path, dtype: np.dtype) -> np.ndarray:
    with path.open("rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype)


class FeatureWriter:
    """Appends features to one open binary file an array (see ``ARRAYS``), so that memory does not grow with them."""

    def __init__(self, files: dict[str, BinaryIO]):
        self.files = files
        self.rows = self.features = self.tokens = 0
        self.sources: dict[tuple[str, bool], int] = {}
        self._write("bounds", [0])

    def add(self, keys: Sequence[RowKey], chunk: EncodedChunk) -> None:
        self._write("ids", chunk.ids)
        self._write("trained", chunk.trained)
        ends = np.cumsum(chunk.lengths, dtype=np.int64)
        self._write("bounds", self.tokens + ends)
        self._write(
            "checks", [_check(chunk.ids[a:b], chunk.trained[a:b]) for a, b in zip(ends - chunk.lengths, ends, strict=True)]
        )
        self._write("rows", np.repeat(np.arange(self.rows, self.rows + len(keys)), chunk.counts))
        self._write("sources", np.repeat([self._source(origin) for _, origin in keys], chunk.counts))
        self._write("numbers", np.repeat([origin.number for _, origin in keys], chunk.counts))
        self.rows += len(keys)
        self.features += len(chunk.lengths)
        self.tokens += len(chunk.ids)

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for name in ("bounds", "ids", "trained"):
            for block in blocks(self.files[name]):
                digest.update(block)
        return digest.hexdigest()

    def _write(self, name: str, values: Any) -> None:
        self.files[name].write(np.ascontiguousarray(values, ARRAYS[name]).tobytes())

    def _source(self, origin: Origin) -> int:
        number = self.sources.setdefault((origin.source, origin.is_line), len(self.sources))
        if number == _MAX_SOURCES:
            raise DataError(f"{origin.source}: more than {_MAX_SOURCES} files in one data set; join some of them")
        return number


class MemoryWriter(FeatureWriter):
    """A FeatureWriter into memory."""

    def __init__(self) -> None:
        super().__init__({name: BytesIO() for name in ARRAYS})

    def store(self) -> FeatureStore:
        arrays = {name: np.frombuffer(self.files[name].getvalue(), dtype) for name, dtype in ARRAYS.items()}
        return FeatureStore(arrays, list(self.sources), self.rows, self.fingerprint())


def _check(ids: np.ndarray, trained: np.ndarray) -> int:
    """CRC-32: finds damage, which is what it is for, and costs little beside reading."""
    return zlib.crc32(np.ascontiguousarray(trained, bool), zlib.crc32(np.ascontiguousarray(ids, np.int32)))


def file_name(array: str) -> str:
    return f"{array}.bin"


def blocks(file: BinaryIO) -> Iterator[bytes]:
    """A whole file, from its start."""
    file.seek(0, os.SEEK_SET)
    while block := file.read(_BLOCK):
        yield block
