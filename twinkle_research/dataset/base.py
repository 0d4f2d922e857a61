"""Dataset: rows in, features out."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from twinkle_research.data_format import InputFeature
from twinkle_research.dataset.cache import Encoded, EncodedCache
from twinkle_research.dataset.encoding import EncodeOptions, encode_rows
from twinkle_research.dataset.features import Features
from twinkle_research.dataset.interleave import interleaving
from twinkle_research.dataset.key import encoding_key
from twinkle_research.dataset.order import keyed_permutation
from twinkle_research.dataset.pipeline import encode_source, read_rows, require_features
from twinkle_research.dataset.rows import DroppedRow, Origin, Processor, Row, RowReport, SourceRow, Stage
from twinkle_research.dataset.sources import DatasetMeta, find_source
from twinkle_research.dataset.store import FeatureStore, FeatureWriter, MemoryWriter
from twinkle_research.errors import ConfigError, DataError
from twinkle_research.symbols import construct, load_symbol
from twinkle_research.template.base import Template

logger = logging.getLogger(__name__)


class Dataset(Features):
    """Rows of one source, all in memory; then, after ``encode``, features. For many rows see ``Dataset.encoded_from``.

    ``on_error``: "raise" ends at the first bad row with a DataError that names it; "skip" leaves bad rows out. Rows
    that are left out, for whatever reason, are listed in ``dropped`` and counted in a warning.
    ``map``, ``filter``, ``shuffle`` and ``encode`` change the data set in place and return it.
    """

    def __init__(self, dataset_meta: DatasetMeta | None = None, on_error: str = "raise"):
        self.meta = dataset_meta
        self.template: Template | None = None
        self._noted: list[DroppedRow] = []
        self.dropped: Sequence[DroppedRow] = self._noted
        self._report = RowReport(on_error, self._note_dropped)
        self._rows: list[Row] = []
        self._origins: list[Origin] = []
        self._store: FeatureStore | None = None
        self._added: list[Dataset] = []
        self._mapped = False
        self._index: np.ndarray | None = None  # numbers of the store's features, in this data set's order; None: all of them
        if dataset_meta is not None:
            stage = self._report.stage("reading")
            for _, origin, row in read_rows(find_source(dataset_meta), dataset_meta, self._report, stage):
                self._origins.append(origin)
                self._rows.append(row)
            self._require_rows("after reading")
            self._warn(stage)

    @classmethod
    def encoded_from(
        cls,
        dataset_meta: DatasetMeta,
        template: Template,
        *,
        processors: Sequence[Processor] = (),
        on_error: str = "raise",
        options: EncodeOptions | None = None,
        cache: EncodedCache | None = None,
    ) -> Dataset:
        """The features of a source's rows, on disk, read as they are asked for.

        They are encoded, chunk by chunk, where ``cache`` does not hold them. Warnings about rows that are left out are shown
        in any case.
        """
        source, name = find_source(dataset_meta), dataset_meta.name
        processors, options, cache = list(processors), options or EncodeOptions(), cache or EncodedCache()

        def key() -> str | None:
            return encoding_key(source.digest(), dataset_meta.data_slice, processors, on_error, template)

        def encode(writer: FeatureWriter, report: RowReport) -> None:
            encode_source(source, dataset_meta, template, processors, options, writer, report)
            if wanted is not None and key() != wanted:
                raise DataError(f"{name}: was changed while it was encoded; start again")

        wanted = key()
        encoded = cache.load(wanted, name, source.names, on_error, encode)
        return cls._of(encoded, dataset_meta, template, on_error)

    @classmethod
    def _of(cls, encoded: Encoded, meta: DatasetMeta, template: Template, on_error: str) -> Dataset:
        dataset = cls(on_error=on_error)
        dataset.meta, dataset.template = meta, template
        dataset._store, dataset.dropped = encoded.store, encoded.dropped
        return dataset

    def __len__(self) -> int:
        if self._store is None:
            return len(self._rows)
        return len(self._store) if self._index is None else len(self._index)

    def __getitem__(self, index: int) -> Row | InputFeature:
        """The feature (after encode) or the row; negative numbers count from the end."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of a data set of {len(self)}")
        index %= len(self)
        return self._rows[index] if self._store is None else self._store.feature(self._in_store(index))

    @property
    def encoded(self) -> bool:
        return self._store is not None

    @property
    def origins(self) -> list[str]:
        """Where each row (or feature) came from."""
        if self._store is None:
            return [str(origin) for origin in self._origins]
        return [str(self._store.origin(self._in_store(i))) for i in range(len(self))]

    @property
    def fingerprint(self) -> str:
        """SHA-256 over what would be trained on: the features after encode, the rows before. File names, number of
        processes and the like have no part in it."""
        if self._store is None:
            digest = hashlib.sha256()
            for row in self._rows:
                digest.update(json.dumps(row, ensure_ascii=True, default=str).encode() + b"\n")
            return digest.hexdigest()
        if self._index is None:
            return self._store.fingerprint
        return hashlib.sha256(self._store.fingerprint.encode() + self._index.tobytes()).hexdigest()

    @property
    def tokens(self) -> int:
        """Of all features."""
        if self._index is None and self._store is not None:
            return int(self._store.bounds[-1])
        return int(self.lengths(np.arange(len(self))).sum())

    def lengths(self, numbers: np.ndarray) -> np.ndarray:
        if self._store is None:
            raise ConfigError("encode must come before lengths")
        return self._store.lengths(numbers if self._index is None else self._index[numbers])

    # --- rows ---------------------------------------------------------------------------------------------------

    def map(
        self, preprocess_func: Any, dataset_meta: DatasetMeta | None = None, init_args: dict[str, Any] | None = None
    ) -> Dataset:
        """Replaces each row by what ``preprocess_func`` returns for it: a row, a list of rows, or None to leave it out.

        ``preprocess_func``: name of a class in twinkle_research.dataset.preprocessor, dotted path, class or function.
        ``dataset_meta``: of a source that ``add_dataset`` has added, to map that instead.
        """
        if (added := self._find_added(dataset_meta)) is not None:
            added.map(preprocess_func, init_args=init_args)
            return self
        processor = self._processor(preprocess_func, dataset_meta, init_args)
        stage = self._report.stage(processor.name)
        new = list(processor(self._source_rows(), self._report, stage))
        self._mapped = True
        self._rows, self._origins = [row.row for row in new], [row.origin for row in new]
        self._require_rows(f"after {processor.name}")
        self._warn(stage)
        return self

    def filter(
        self, filter_func: Any, dataset_meta: DatasetMeta | None = None, init_args: dict[str, Any] | None = None
    ) -> Dataset:
        """Keeps the rows for which ``filter_func(row)`` is true."""
        if (added := self._find_added(dataset_meta)) is not None:
            added.filter(filter_func, init_args=init_args)
            return self
        function = self._processor(filter_func, dataset_meta, init_args).function
        keep = [bool(function(row)) for row in self._rows]
        self._rows = [row for row, kept in zip(self._rows, keep, strict=True) if kept]
        self._origins = [origin for origin, kept in zip(self._origins, keep, strict=True) if kept]
        self._require_rows("after filter")
        return self

    def add_dataset(self, dataset_meta: DatasetMeta) -> Dataset:
        """Reads another source, whose rows ``mix_dataset`` joins with those that are here."""
        self._require_unencoded("add_dataset")
        self._added.append(Dataset(dataset_meta, self._report.on_error))
        return self

    def mix_dataset(
        self, interleave: bool = True, weights: Sequence[float] | None = None, stop: str = "first_exhausted"
    ) -> Dataset:
        """Joins the rows of all sources: one source after the other, or with ``interleave`` in turns by ``weights`` (equal
        by default; in the order in which the sources came) until ``stop``, as in MixedDataset."""
        self._require_unencoded("mix_dataset")
        parts = [self, *self._added]
        sizes = [len(part) for part in parts]
        if interleave:
            turns = interleaving(weights or [1.0] * len(parts), sizes, stop)
        else:
            turns = np.repeat(np.arange(len(parts)), sizes)
        places = np.empty(len(turns), np.int64)
        for number, size in enumerate(sizes):
            here = turns == number
            places[here] = np.arange(here.sum()) % size
        joined = [(parts[turn]._origins[place], parts[turn]._rows[place]) for turn, place in zip(turns, places, strict=True)]
        logger.info("%s: mixed %d rows of %s", _name(self.meta), len(joined), " + ".join(map(str, sizes)))
        self._origins, self._rows = [origin for origin, _ in joined], [row for _, row in joined]
        self._noted += [dropped for part in self._added for dropped in part.dropped]
        self._added = []
        return self

    def shuffle(self, seed: int) -> Dataset:
        """An order that depends on ``seed`` and the number of rows only."""
        return self._take(keyed_permutation(len(self), seed, "dataset_shuffle"))

    def hold_out(self, count: int, seed: int) -> Dataset:
        """Takes ``count`` rows, chosen by ``seed``, out of this data set; returns them as one of their own.

        After encode too it is rows that are counted, dropped ones included, and a row's features stay together.
        """
        rows = len(self) if self._store is None else self._store.rows
        if not 0 < count < rows:
            raise DataError(
                f"data.eval_rows={count}: cannot hold out {count} of {rows} rows of {_name(self.meta)}: "
                "at least one must be held out, and at least one left for training"
            )
        chosen = np.zeros(rows, bool)
        chosen[keyed_permutation(rows, seed, "hold_out")[:count]] = True
        if self._store is not None:
            numbers = self._store.row_numbers
            chosen = chosen[numbers if self._index is None else numbers[self._index]]
            for part, what in ((chosen, f"the {count} held-out rows"), (~chosen, f"the {rows - count} rows left for training")):
                if not part.any():
                    raise DataError(f"{_name(self.meta)}: none of {what} can be trained on; see the rows that were dropped")
        held = Dataset(on_error=self._report.on_error)
        held.meta, held.template = self.meta, self.template
        held._rows, held._origins, held._store, held._index = self._rows, self._origins, self._store, self._index
        held._take(np.flatnonzero(chosen))
        self._take(np.flatnonzero(~chosen))
        return held

    # --- features -----------------------------------------------------------------------------------------------

    def set_template(self, template_func: Any, **kwargs: Any) -> Dataset:
        """``template_func``: a Template, its class, or its name (``kwargs`` go to the class, e.g. model_id, max_length)."""
        template = load_symbol(template_func, "twinkle_research.template", "template")
        self.template = construct(template, "set_template", **kwargs)
        if not isinstance(self.template, Template):
            raise ConfigError(f"a template is a Template, its class or its name, got {template!r}")
        return self

    def encode(
        self,
        add_generation_prompt: bool = False,
        *,
        batched: bool = True,
        num_proc: int = 1,
        timeout: float | None = None,
        on_error: str | None = None,
        progress: bool | None = None,
    ) -> Dataset:
        """Turns all rows into features; the rows themselves are let go.

        ``batched=False`` encodes row by row (same result, slower). ``num_proc`` processes share the work; the result
        does not depend on it. ``timeout``: seconds, then a UserError. ``progress=None``: a bar for long work in a
        terminal. Raises DataError where a row is bad (unless on_error is "skip") or none is left.
        """
        self._require_unencoded("encode")
        if self.template is None:
            raise ConfigError("set_template must come before encode")
        if self._added:
            raise ConfigError("mix_dataset must come before encode, since add_dataset has added sources")
        options = EncodeOptions(batched, num_proc, timeout, progress)
        if on_error is not None:
            self._report = RowReport(on_error, self._note_dropped)
        stage, writer = self._report.stage("encoding"), MemoryWriter()
        rows = self._source_rows()
        as_read = self.meta is not None and self.meta.data is None and not self._mapped
        for keys, chunk in encode_rows(
            self.template, rows, self._report, stage, options, add_generation_prompt, len(self._rows), as_read
        ):
            writer.add(keys, chunk)
        require_features(writer, stage)
        self._warn(stage)
        self._store = writer.store()
        self._rows, self._origins = [], []
        return self

    # --- inner --------------------------------------------------------------------------------------------------

    def _in_store(self, index: int) -> int:
        return index if self._index is None else int(self._index[index])

    def _take(self, order: np.ndarray) -> Dataset:
        if self._store is not None:
            self._index = order if self._index is None else self._index[order]
        else:
            self._rows, self._origins = [self._rows[i] for i in order], [self._origins[i] for i in order]
        return self

    def _source_rows(self) -> Iterator[SourceRow]:
        return (SourceRow(i, origin, row) for i, (origin, row) in enumerate(zip(self._origins, self._rows, strict=True)))

    def _find_added(self, meta: DatasetMeta | None) -> Dataset | None:
        return next((part for part in self._added if meta is not None and part.meta == meta), None)

    def _processor(self, function: Any, meta: DatasetMeta | None, init_args: dict[str, Any] | None) -> Processor:
        self._require_unencoded("map and filter")
        if meta is not None and meta != self.meta:
            raise ValueError("dataset_meta names another data set than those that are here")
        return Processor(function, init_args)

    def _note_dropped(self, origin: Origin, reason: str) -> None:
        self._noted.append(DroppedRow(str(origin), reason))

    def _require_rows(self, when: str) -> None:
        if not self._rows:
            summary = self._report.summary()
            raise DataError(f"{_name(self.meta)}: no rows {when}" + (f": {summary}" if summary else ""))

    def _require_unencoded(self, what: str) -> None:
        if self._store is not None:
            raise ConfigError(f"{what} must come before encode")

    def _warn(self, stage: Stage) -> None:
        for text in stage.warnings():
            logger.warning("%s: %s", _name(self.meta), text)


def _name(meta: DatasetMeta | None) -> str:
    return "data" if meta is None else meta.name
