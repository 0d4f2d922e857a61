"""Dataset: rows in, features out."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from twinkle_research.data_format import InputFeature
from twinkle_research.dataset.encoding import FeatureStore, encode_chunks
from twinkle_research.dataset.order import keyed_permutation
from twinkle_research.dataset.reader import Row, is_pattern, read_path
from twinkle_research.errors import ConfigError, DataError, UserError, nearest
from twinkle_research.symbols import load_symbol
from twinkle_research.template.base import Template

logger = logging.getLogger(__name__)

BUILTIN = {"identity": Path(__file__).with_name("identity.jsonl")}
_BUILTIN_PREFIX = "builtin://"


@dataclass
class DatasetMeta:
    """Where rows come from.

    ``dataset_id``: a file or folder (JSONL, JSON, CSV, TSV, Parquet), ``builtin://identity``, or a Hugging Face id
    (``hf://`` may stand before it); or ``data``: the rows themselves. ``data_slice``: numbers of the rows to take, in
    that order; a range may reach beyond the end.
    """

    dataset_id: str = ""
    subset_name: str = "default"
    split: str = "train"
    data_slice: Iterable[int] | None = None
    data: Any = None

    def __post_init__(self) -> None:
        if not self.dataset_id and self.data is None:
            raise ValueError("DatasetMeta needs dataset_id or data")
        if self.data_slice is not None and not isinstance(self.data_slice, Iterable):
            raise ValueError(f"data_slice must be an iterable of row numbers, got {self.data_slice!r}")


@dataclass(frozen=True)
class DroppedRow:
    """A row that is not trained on, and why."""

    row: str
    reason: str


class Dataset:
    """Rows of one source, then, after ``encode``, features.

    ``on_error``: "raise" ends at the first bad row with a DataError that names it; "skip" leaves bad rows out. Rows
    that are left out, for whatever reason, are listed in ``dropped`` and counted in a warning.
    ``map``, ``filter``, ``shuffle`` and ``encode`` change the data set in place and return it.
    """

    def __init__(self, dataset_meta: DatasetMeta | None = None, on_error: str = "raise"):
        if on_error not in ("raise", "skip"):
            raise ConfigError(f"on_error={on_error!r}: {nearest(on_error, ('raise', 'skip'))}")
        self.meta = dataset_meta
        self.on_error = on_error
        self.template: Template | None = None
        self.dropped: list[DroppedRow] = []
        self._rows: list[Row] = []
        self._origins: list[str] = []
        self._store: FeatureStore | None = None
        if dataset_meta is not None:
            for origin, row in _load(dataset_meta, self._bad_row):
                self._origins.append(origin)
                self._rows.append(row)
            self._require_rows("after reading")
            self._warn_dropped(0, "reading", len(self._rows) + len(self.dropped))

    def __len__(self) -> int:
        return len(self._rows if self._store is None else self._store)

    def __getitem__(self, index: int) -> Row | InputFeature:
        """The feature (after encode) or the row; negative numbers count from the end."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of a data set of {len(self)}")
        index %= len(self)
        return self._rows[index] if self._store is None else self._store.feature(index)

    def __iter__(self) -> Iterator[Row | InputFeature]:
        return (self[i] for i in range(len(self)))

    @property
    def encoded(self) -> bool:
        return self._store is not None

    @property
    def origins(self) -> list[str]:
        """Where each row (or feature) came from."""
        return self._origins if self._store is None else self._store.rows

    @property
    def fingerprint(self) -> str:
        """SHA-256 over what would be trained on: the features after encode, the rows before. File names, number of
        processes and the like have no part in it."""
        digest = hashlib.sha256()
        if self._store is None:
            for row in self._rows:
                digest.update(json.dumps(row, ensure_ascii=True, default=str).encode() + b"\n")
        else:
            for array in (self._store.bounds, self._store.ids, self._store.trained):
                digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    # --- rows ---------------------------------------------------------------------------------------------------

    def map(
        self, preprocess_func: Any, dataset_meta: DatasetMeta | None = None, init_args: dict[str, Any] | None = None
    ) -> Dataset:
        """Replaces each row by what ``preprocess_func`` returns for it: a row, a list of rows, or None to leave it out.

        ``preprocess_func``: name of a class in twinkle_research.dataset.preprocessor, dotted path, class or function.
        """
        name = (
            preprocess_func if isinstance(preprocess_func, str) else getattr(preprocess_func, "__name__", repr(preprocess_func))
        )
        function = self._row_function(preprocess_func, dataset_meta, init_args)
        rows, origins, before, total = [], [], len(self.dropped), len(self._rows)
        for origin, row in zip(self._origins, self._rows, strict=True):
            try:
                result = function(row)
            except Exception as exc:  # the user's own code: whatever it raises is shown with the row that caused it
                self._bad_row(origin, f"{name} failed: {type(exc).__name__}: {exc}", exc)
                continue
            results = [] if result is None else result if isinstance(result, list) else [result]
            if not results:
                self.dropped.append(DroppedRow(origin, f"left out by {name}"))
            for new in results:
                if not isinstance(new, dict):
                    raise DataError(
                        f"{origin}: {name} returned {type(new).__name__}; expected a row (dict), a list of rows, or None"
                    )
                rows.append(new)
                origins.append(origin)
        self._rows, self._origins = rows, origins
        self._require_rows(f"after {name}")
        self._warn_dropped(before, name, total)
        return self

    def filter(
        self, filter_func: Any, dataset_meta: DatasetMeta | None = None, init_args: dict[str, Any] | None = None
    ) -> Dataset:
        """Keeps the rows for which ``filter_func(row)`` is true."""
        function = self._row_function(filter_func, dataset_meta, init_args)
        keep = [bool(function(row)) for row in self._rows]
        self._rows = [row for row, kept in zip(self._rows, keep, strict=True) if kept]
        self._origins = [origin for origin, kept in zip(self._origins, keep, strict=True) if kept]
        self._require_rows("after filter")
        return self

    def shuffle(self, seed: int) -> Dataset:
        """An order that depends on ``seed`` and the number of rows only."""
        order = keyed_permutation(len(self), seed, "dataset_shuffle")
        if self._store is not None:
            self._store = self._store.take(order)
        else:
            self._rows, self._origins = [self._rows[i] for i in order], [self._origins[i] for i in order]
        return self

    def hold_out(self, count: int, seed: int) -> Dataset:
        """Takes ``count`` rows, chosen by ``seed``, out of this data set; returns them as one of their own."""
        self._require_unencoded("hold_out")
        if not 0 < count < len(self):
            raise DataError(
                f"data.eval_rows={count}: cannot hold out {count} of {len(self)} rows of {_source_name(self.meta)}: "
                "at least one must be held out, and at least one left for training"
            )
        chosen = set(keyed_permutation(len(self), seed, "hold_out")[:count].tolist())
        held = Dataset(on_error=self.on_error)
        held.template = self.template
        for part, kept in ((held, chosen), (self, set(range(len(self))) - chosen)):
            indices = sorted(kept)
            part._rows, part._origins = [self._rows[i] for i in indices], [self._origins[i] for i in indices]
        return held

    # --- features -----------------------------------------------------------------------------------------------

    def set_template(self, template_func: Any, **kwargs: Any) -> Dataset:
        """``template_func``: a Template, its class, or its name (``kwargs`` go to the class, e.g. model_id, max_length)."""
        template = load_symbol(template_func, "twinkle_research.template", "template")
        if isinstance(template, Template) and kwargs:
            raise ValueError(f"a ready Template takes no further settings: {', '.join(kwargs)}")
        self.template = template if isinstance(template, Template) else template(**kwargs)
        return self

    def encode(
        self,
        add_generation_prompt: bool = False,
        *,
        batched: bool = True,
        num_proc: int = 1,
        on_error: str | None = None,
        progress: bool | None = None,
    ) -> Dataset:
        """Turns all rows into features; the rows themselves are let go.

        ``batched=False`` encodes row by row (same result, slower). ``num_proc`` processes share the work; the result
        does not depend on it. ``progress=None``: a bar for long work in a terminal. Raises DataError where a row is bad
        (unless on_error is "skip") or none is left.
        """
        self._require_unencoded("encode")
        if self.template is None:
            raise ConfigError("set_template must come before encode")
        if num_proc < 1:
            raise ConfigError(f"num_proc must be >= 1, got {num_proc}")
        self.on_error = on_error or self.on_error
        ids, trained, lengths, origins, cut, start, before = [], [], [], [], [], 0, len(self.dropped)
        for chunk in encode_chunks(self.template, self._rows, add_generation_prompt, batched, num_proc, progress):
            for i, reason in chunk.errors:
                self._bad_row(self._origins[start + i], reason)
            self.dropped += [DroppedRow(self._origins[start + i], reason) for i, reason in chunk.dropped]
            cut += [self._origins[start + i] for i in chunk.cut]
            for i, count in enumerate(chunk.counts):
                origins += [self._origins[start + i]] * count
            ids.append(chunk.ids)
            trained.append(chunk.trained)
            lengths += chunk.lengths
            start += len(chunk.counts)
        if not origins:
            raise DataError(f"none of {len(self._rows)} rows can be trained on: {self.dropped_summary(before)}")
        self._warn_dropped(before, "encoding", len(self._rows))
        self._warn_cut(cut)
        self._store = FeatureStore(np.concatenate(ids), np.concatenate(trained), lengths, origins)
        self._rows, self._origins = [], []
        return self

    def dropped_summary(self, start: int = 0) -> str:
        """Dropped rows from number ``start`` on, counted by reason with the first few rows of each; '' for none."""
        by_reason: dict[str, list[str]] = {}
        for dropped in self.dropped[start:]:
            by_reason.setdefault(dropped.reason, []).append(dropped.row)
        parts = [
            f"{len(rows)} {reason} ({', '.join(rows[:5])}{', ...' if len(rows) > 5 else ''})"
            for reason, rows in by_reason.items()
        ]
        shown = "; ".join(parts[:10])
        return shown + (f"; and {len(parts) - 10} more reasons" if len(parts) > 10 else "")

    # --- inner --------------------------------------------------------------------------------------------------

    def _row_function(self, function: Any, meta: DatasetMeta | None, init_args: dict[str, Any] | None) -> Callable[[Row], Any]:
        self._require_unencoded("map and filter")
        if meta is not None and meta != self.meta:
            raise ValueError("dataset_meta names another data set; a Dataset has one source")
        function = load_symbol(function, "twinkle_research.dataset.preprocessor", "processor")
        if isinstance(function, type):
            try:
                return function(**(init_args or {}))
            except TypeError as exc:
                raise ConfigError(f"{function.__name__} does not take these arguments: {exc}") from exc
        if init_args:
            raise ConfigError(f"arguments {', '.join(init_args)} have no effect: {function!r} is a function, not a class")
        return function

    def _bad_row(self, origin: str, reason: str, cause: Exception | None = None) -> None:
        if self.on_error == "raise":
            raise DataError(f"{origin}: {reason}") from cause
        self.dropped.append(DroppedRow(origin, reason))

    def _require_rows(self, when: str) -> None:
        if not self._rows:
            summary = self.dropped_summary()
            raise DataError(f"{_source_name(self.meta)}: no rows {when}" + (f": {summary}" if summary else ""))

    def _require_unencoded(self, what: str) -> None:
        if self._store is not None:
            raise ConfigError(f"{what} must come before encode")

    def _warn_dropped(self, start: int, where: str, total: int) -> None:
        if len(self.dropped) > start:
            count = len(self.dropped) - start
            logger.warning(
                "%s: %s dropped %d rows (of %d): %s", _source_name(self.meta), where, count, total, self.dropped_summary(start)
            )

    def _warn_cut(self, origins: list[str]) -> None:
        if origins:
            how = self.template.truncation_strategy
            shown = ", ".join(origins[:5]) + (", ..." if len(origins) > 5 else "")
            logger.warning(
                "%s: encoding %s %d rows (of %d) longer than max_length=%d: %s",
                _source_name(self.meta), "split" if how == "split" else f"cut ({how})", len(origins), len(self._rows),
                self.template.max_length, shown,
            )  # fmt: skip


def _source_name(meta: DatasetMeta | None) -> str:
    return (meta.dataset_id if meta else "") or "data"


def _load(meta: DatasetMeta, on_bad: Callable[[str, str], None]) -> Iterator[tuple[str, Row]]:
    rows = _source(meta, on_bad)
    if meta.data_slice is None:
        return rows
    if isinstance(meta.data_slice, range) and meta.data_slice.step > 0 and meta.data_slice.start >= 0:
        return islice(rows, meta.data_slice.start, meta.data_slice.stop, meta.data_slice.step)
    wanted, found = list(meta.data_slice), list(rows)
    outside = [i for i in wanted if not -len(found) <= i < len(found)]
    if outside:
        raise DataError(f"{_source_name(meta)}: data_slice names row {outside[0]}, but there are {len(found)} rows")
    return (found[i] for i in wanted)


def _source(meta: DatasetMeta, on_bad: Callable[[str, str], None]) -> Iterator[tuple[str, Row]]:
    name = str(meta.dataset_id)
    if meta.data is not None:
        return ((f"{name or 'data'}[{i}]", row) for i, row in enumerate(meta.data))
    if name.startswith(_BUILTIN_PREFIX):
        builtin = name.removeprefix(_BUILTIN_PREFIX)
        if builtin not in BUILTIN:
            raise DataError(f"{name}: no such built-in data; {nearest(builtin, BUILTIN)}")
        return ((name + origin[origin.rindex(":") :], row) for origin, row in read_path(BUILTIN[builtin], on_bad))
    if name.startswith("ms://"):
        raise UserError(
            f"{name}: ModelScope data sets are not supported; download the file and give its path, or use a Hugging Face id"
        )
    looks_like_file = Path(name).suffix or name.startswith((".", "/", "~")) or name.count("/") > 1 or is_pattern(name)
    if os.path.lexists(os.path.expanduser(name)) or (looks_like_file and not name.startswith("hf://")):
        return read_path(name, on_bad)
    return _read_hub(meta, name.removeprefix("hf://"))


def _read_hub(meta: DatasetMeta, name: str) -> Iterator[tuple[str, Row]]:
    import datasets

    subset = None if meta.subset_name == "default" else meta.subset_name
    try:
        loaded = datasets.load_dataset(name, subset, split=meta.split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as exc:
        raise DataError(f"{name}: cannot be loaded from the Hugging Face hub (and is no local file): {exc}") from exc
    return ((f"{name}/{meta.split}[{i}]", row) for i, row in enumerate(loaded))
