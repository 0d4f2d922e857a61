"""Rows from a source through processors to features, without ever holding all of them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence

from twinkle_research.dataset.encoding import EncodeOptions, encode_rows
from twinkle_research.dataset.rows import Origin, Processor, RowReport, SourceRow, Stage
from twinkle_research.dataset.sources import DatasetMeta, Source, read_slice
from twinkle_research.dataset.store import FeatureWriter
from twinkle_research.errors import DataError
from twinkle_research.template.base import Template

logger = logging.getLogger(__name__)


def read_rows(source: Source, meta: DatasetMeta, report: RowReport, stage: Stage, start: int = 0) -> Iterator[SourceRow]:
    """The rows of ``meta``, numbered from 0, without the first ``start``."""

    def on_bad(origin: Origin, reason: str) -> None:
        stage.total += 1
        report.bad(stage, origin, reason)

    rows = read_slice(source, meta.data_slice, on_bad, meta.name, start)
    for number, (origin, row) in enumerate(rows, start=start):
        stage.total += 1
        yield SourceRow(number, origin, row)


def processed(rows: Iterable[SourceRow], processors: Sequence[Processor], report: RowReport) -> Iterator[SourceRow]:
    for processor in processors:
        rows = processor(rows, report, report.stage(processor.name))
    return iter(rows)


def encode_source(
    source: Source,
    meta: DatasetMeta,
    template: Template,
    processors: Sequence[Processor],
    options: EncodeOptions,
    writer: FeatureWriter,
    report: RowReport,
) -> None:
    reading = report.stage("reading")
    rows = processed(read_rows(source, meta, report, reading), processors, report)
    stage = report.stage("encoding")
    logger.info("%s: encoding rows", meta.name)
    as_read = not processors and meta.data is None
    for keys, chunk in encode_rows(template, rows, report, stage, options, note_columns=as_read):
        writer.add(keys, chunk)
    if stage.total == 0:
        # The first step that let nothing through; the one after it had no rows to look at.
        last = next(before for before, after in zip(report.stages, report.stages[1:]) if after.total == 0)
        summary = report.summary()
        raise DataError(f"{meta.name}: no rows after {last.name}" + (f": {summary}" if summary else ""))
    require_features(writer, stage)


def require_features(writer: FeatureWriter, stage: Stage) -> None:
    if not writer.features:
        raise DataError(f"none of {stage.total} rows can be trained on: {stage.dropped.text()}")
