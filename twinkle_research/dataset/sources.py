"""Where rows come from: local files, the built-in set, the Hugging Face hub, ModelScope, or a list of rows."""

from __future__ import annotations

import hashlib
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from operator import index
from pathlib import Path
from typing import Any

from twinkle_research.dataset.reader import data_files, is_pattern, read_path, unread
from twinkle_research.dataset.rows import OnBad, Origin, Row
from twinkle_research.errors import DataError, UserError, nearest

logger = logging.getLogger(__name__)

BUILTIN = {"identity": Path(__file__).with_name("identity.jsonl")}
_BUILTIN_PREFIX = "builtin://"


@dataclass
class DatasetMeta:
    """Where rows come from.

    ``dataset_id``: a file or folder (JSONL, JSON, CSV, TSV, Parquet), ``builtin://identity``, a Hugging Face id
    (``hf://`` may stand before it) or ``ms://`` and a ModelScope id; or ``data``: the rows themselves, or a Source.
    ``data_slice``: numbers of the rows to take, in that order; a range may reach beyond the end.
    """

    dataset_id: str = ""
    subset_name: str = "default"
    split: str = "train"
    data_slice: Iterable[int] | None = None
    data: Any = None

    def __post_init__(self) -> None:
        if not self.dataset_id and self.data is None:
            raise ValueError("DatasetMeta needs dataset_id or data")
        if self.data_slice is not None and not isinstance(self.data_slice, range):
            try:
                self.data_slice = [index(number) for number in self.data_slice]  # a generator could be read once only
            except TypeError as exc:
                raise ValueError(f"data_slice must be an iterable of row numbers, got {self.data_slice!r}") from exc

    @property
    def name(self) -> str:
        return str(self.dataset_id) or "data"


class Source(ABC):
    """Rows that can be read again and again, in the same order."""

    @property
    @abstractmethod
    def names(self) -> list[str]:
        """``Origin.source`` of its rows: one name, or one for each file."""

    @abstractmethod
    def rows(self, on_bad: OnBad) -> Iterator[tuple[Origin, Row]]: ...

    @abstractmethod
    def digest(self) -> str | None:
        """SHA-256 over what the rows are read from, names left out; None where that cannot be known."""


class FileSource(Source):
    """A file, or the files of a folder in the order of their names. ``shown``: what to call it instead of its path."""

    def __init__(self, path: str | Path, shown: str | None = None):
        self.path = Path(path).expanduser()
        self.shown = shown
        self.files = data_files(self.path)
        others = unread(self.path) if self.path.is_dir() else ""
        if others:
            logger.warning("%s: not read: %s", self.path, others)

    @property
    def names(self) -> list[str]:
        return [str(file) for file in self.files] if self.shown is None else [self.shown]

    def rows(self, on_bad: OnBad) -> Iterator[tuple[Origin, Row]]:
        if self.shown is None:
            return read_path(self.path, on_bad)
        rows = read_path(self.path, lambda origin, reason: on_bad(origin._replace(source=self.shown), reason))
        return ((origin._replace(source=self.shown), row) for origin, row in rows)

    def digest(self) -> str:
        return digest_of_files(self.files)


class ListSource(Source):
    def __init__(self, name: str, data: Iterable[Row]):
        self.name = name
        self.data = data
        self._is_spent = False

    @property
    def names(self) -> list[str]:
        return [self.name]

    def rows(self, on_bad: OnBad) -> Iterator[tuple[Origin, Row]]:
        if self._is_spent:
            raise DataError(
                f"{self.name}: its rows are a generator, which can be read once only; give a list of them or a Source"
            )
        self._is_spent = isinstance(self.data, Iterator)
        return ((Origin(self.name, i), row) for i, row in enumerate(self.data))

    def digest(self) -> None:
        return None


class HubSource(Source):
    """A data set of a hub. ``streaming``: its rows are fetched as they are read, and nothing is kept on disk."""

    def __init__(self, meta: DatasetMeta, name: str, streaming: bool):
        self.name = name
        self.subset = None if meta.subset_name == "default" else meta.subset_name
        self.split = meta.split
        self.streaming = streaming

    @property
    def names(self) -> list[str]:
        return [f"{self.name}/{self.split}"]

    def rows(self, on_bad: OnBad) -> Iterator[tuple[Origin, Row]]:
        import datasets

        name, number = self.names[0], 0
        try:
            for row in self._loaded:
                yield Origin(name, number), row
                number += 1
        except (OSError, datasets.exceptions.DatasetsError) as exc:
            raise DataError(f"{Origin(name, number)}: cannot be fetched from {self._where}: {exc}") from exc

    def digest(self) -> str | None:
        """Over the files on disk that the hub's library made of the data set."""
        if self.streaming:
            return None
        files = [Path(file["filename"]) for file in self._loaded.cache_files]
        return f"{self.split}:{digest_of_files(files)}" if files else None

    @cached_property
    def _loaded(self) -> Any:
        import datasets

        try:
            return self._load()
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as exc:
            raise DataError(f"{self.name}: cannot be loaded from {self._where} (and is no local file): {exc}") from exc

    _where = "the Hugging Face hub"

    def _load(self) -> Any:
        import datasets

        return datasets.load_dataset(self.name, self.subset, split=self.split, streaming=self.streaming)


class ModelScopeSource(HubSource):
    _where = "ModelScope"

    def _load(self) -> Any:
        try:
            from modelscope.msdatasets import MsDataset
        except ModuleNotFoundError as exc:
            raise UserError(
                f"ms://{self.name}: ModelScope data sets need the package {exc.name}: pip install 'twinkle_research[modelscope]' "
                "(or download the file and give its path, or use a Hugging Face id)"
            ) from exc
        loaded = MsDataset.load(self.name, subset_name=self.subset, split=self.split, use_streaming=self.streaming)
        return loaded.ds_instance if isinstance(loaded, MsDataset) else loaded


def find_source(meta: DatasetMeta, streaming: bool = False) -> Source:
    """``streaming``: of a hub's data set fetch only what is read."""
    name = str(meta.dataset_id)
    if isinstance(meta.data, Source):
        return meta.data
    if meta.data is not None:
        return ListSource(meta.name, meta.data)
    if name.startswith(_BUILTIN_PREFIX):
        builtin = name.removeprefix(_BUILTIN_PREFIX)
        if builtin not in BUILTIN:
            raise DataError(f"{name}: no such built-in data; {nearest(builtin, BUILTIN)}")
        return FileSource(BUILTIN[builtin], shown=name)
    if name.startswith("ms://"):
        return ModelScopeSource(meta, name.removeprefix("ms://"), streaming)
    looks_like_file = Path(name).suffix or name.startswith((".", "/", "~")) or name.count("/") > 1 or is_pattern(name)
    if os.path.lexists(os.path.expanduser(name)) or (looks_like_file and not name.startswith("hf://")):
        return FileSource(name)
    return HubSource(meta, name.removeprefix("hf://"), streaming)


def read_slice(
    source: Source, data_slice: Iterable[int] | None, on_bad: OnBad, name: str, start: int = 0
) -> Iterator[tuple[Origin, Row]]:
    """The rows that ``data_slice`` names, without the first ``start`` of them."""
    rows = source.rows(on_bad)
    if data_slice is None:
        return islice(rows, start, None)
    if isinstance(data_slice, range) and data_slice.step > 0 and data_slice.start >= 0:
        return islice(rows, data_slice.start + start * data_slice.step, data_slice.stop, data_slice.step)
    wanted, found = list(data_slice), list(rows)
    outside = [i for i in wanted if not -len(found) <= i < len(found)]
    if outside:
        raise DataError(f"{name}: data_slice names row {outside[0]}, but there are {len(found)} rows")
    return (found[i] for i in wanted[start:])


def digest_of_files(files: Iterable[Path]) -> str:
    """SHA-256 over the contents of files, in order, and how each is read."""
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            digest.update(f"{path.suffix.lower()}\n{hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()
