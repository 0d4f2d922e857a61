"""IterableDataset: features made while they are used."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

from twinkle_research.data_format import InputFeature
from twinkle_research.dataset.encoding import EncodeOptions, encode_rows
from twinkle_research.dataset.key import stream_fingerprint
from twinkle_research.dataset.pipeline import processed, read_rows
from twinkle_research.dataset.rows import Processor, RowReport
from twinkle_research.dataset.sources import DatasetMeta, find_source
from twinkle_research.errors import ConfigError, DataError
from twinkle_research.symbols import construct, load_symbol
from twinkle_research.template.base import Template, to_feature
from twinkle_research.template.tokens import Tokens

logger = logging.getLogger(__name__)


class Position(NamedTuple):
    """A place in a pass over the source: ``features`` of the row number ``row`` (from 0, as it was read) are behind it."""

    row: int
    features: int


START = Position(0, 0)


class IterableDataset:
    """Features of one source in its order, read, processed and encoded chunk by chunk when they are asked for.

    How many there are shows at the end of a pass. Nothing is kept, so each pass encodes again; ``num_proc`` > 1 processes
    do so ahead of their use. ``on_error`` is as in Dataset; rows that are left out are counted in warnings as they grow in
    number, and at the end of a pass.
    """

    def __init__(
        self, dataset_meta: DatasetMeta, on_error: str = "raise", num_proc: int = 1, processors: Sequence[Processor] = ()
    ):
        self.meta = dataset_meta
        self.on_error = on_error
        self.options = EncodeOptions(num_proc=num_proc, progress=False)
        self.template: Template | None = None
        self._processors = list(processors)
        self._source = find_source(dataset_meta, streaming=True)
        RowReport(on_error, lambda origin, reason: None)  # refuses another on_error now rather than at the first row

    def map(self, preprocess_func: Any, init_args: dict[str, Any] | None = None) -> IterableDataset:
        """As Dataset.map, when a row is used."""
        self._processors.append(Processor(preprocess_func, init_args))
        return self

    def set_template(self, template_func: Any, **kwargs: Any) -> IterableDataset:
        """As Dataset.set_template."""
        template = load_symbol(template_func, "twinkle_research.template", "template")
        self.template = construct(template, "set_template", **kwargs)
        if not isinstance(self.template, Template):
            raise ConfigError(f"a template is a Template, its class or its name, got {template!r}")
        if self.template.pairs:
            raise ConfigError("preferences cannot be streamed: encode them as a Dataset, and give Pairs of it to the loader")
        return self

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the source's content and what turns it into features. Code of the user's counts by its name, a
        data set that is fetched from a hub by its id."""
        return stream_fingerprint(
            self._source.digest() or self._source.names, self.meta.data_slice, self._processors, self._template
        )

    def __iter__(self) -> Iterator[InputFeature]:
        """The features of one pass."""
        return (feature for _, feature in self.features())

    def features(self, start: Position = START) -> Iterator[tuple[Position, InputFeature]]:
        """The rest of a pass after ``start``: each feature with the position after it.

        Raises DataError where a row is bad, and at the end of a whole pass that gave no feature.
        """
        report = RowReport(self.on_error, lambda origin, reason: None)
        warnings = _GrowingWarnings(self.meta.name, report)
        reading = report.stage("reading")
        rows = processed(read_rows(self._source, self.meta, report, reading, start.row), self._processors, report)
        stage = report.stage("encoding")
        place, given = start._replace(features=0), 0
        as_read = not self._processors and self.meta.data is None
        for keys, chunk in encode_rows(self._template, rows, report, stage, self.options, note_columns=as_read):
            warnings.show()
            end = 0
            lengths = iter(chunk.lengths)
            for (number, origin), count in zip(keys, chunk.counts, strict=True):
                for length in islice(lengths, count):
                    part, end = slice(end, end + length), end + length
                    place = Position(number, place.features + 1 if number == place.row else 1)
                    given += 1
                    if place > start:
                        yield place, to_feature(Tokens(chunk.ids[part], chunk.trained[part]), str(origin))
        warnings.show(last=True)
        if given == 0 and start == START:
            summary = report.summary()
            raise DataError(f"{self.meta.name}: no row can be trained on" + (f": {summary}" if summary else ""))

    @property
    def _template(self) -> Template:
        if self.template is None:
            raise ConfigError("set_template must come before the first row")
        return self.template


class _GrowingWarnings:
    """Warnings about rows, those that were left out first: each time that their number has grown tenfold, and at the end."""

    def __init__(self, name: str, report: RowReport):
        self.name = name
        self.report = report
        self.shown = 0

    def show(self, last: bool = False) -> None:
        count = sum(counts.total for stage in self.report.stages for counts in stage.counts)
        if count > self.shown and (last or count >= 10 * self.shown):
            self.shown = count
            for text in self.report.warnings():
                logger.warning("%s: %s%s", self.name, "" if last else "so far, ", text)
