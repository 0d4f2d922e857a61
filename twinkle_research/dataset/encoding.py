"""Encoding of many rows, chunk by chunk, in this process or several. Neither rows nor features are all held at once."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from multiprocessing.connection import wait
from typing import Any

import numpy as np

from twinkle_research.dataset.formats import to_trainable, unread_columns
from twinkle_research.dataset.preferences import encode_pairs, unread_beside_pairs
from twinkle_research.dataset.rows import Origin, RowReport, SourceRow, Stage
from twinkle_research.errors import ConfigError, DataError, UserError
from twinkle_research.template.base import RowResult, Template

CHUNK = 256  # rows tokenised together, and sent to a worker together
_AHEAD = 3  # chunks on their way for each worker process
_SHOW_PROGRESS_FROM = 4000  # rows


@dataclass
class EncodedChunk:
    """``CHUNK`` rows or fewer. Features of all rows one after the other; ``counts[i]``: how many row i gave.

    ``dropped`` and ``errors`` hold (position of the row in the chunk, reason), ``cut`` the positions of cut or split rows,
    ``control`` (position, control token in the row's text), ``unread`` column -> (rows that have it, position of the first).
    """

    ids: np.ndarray
    trained: np.ndarray
    lengths: list[int]
    counts: list[int]
    dropped: list[tuple[int, str]] = field(default_factory=list)
    errors: list[tuple[int, str]] = field(default_factory=list)
    cut: list[int] = field(default_factory=list)
    control: list[tuple[int, str]] = field(default_factory=list)
    unread: dict[str, tuple[int, int]] = field(default_factory=dict)


RowKey = tuple[int, Origin]  # a SourceRow without the row itself


@dataclass(frozen=True)
class EncodeOptions:
    """How rows are encoded; none of it changes the result.

    ``batched=False``: row by row. ``num_proc``: processes that share the work. ``timeout``: seconds, then a UserError.
    ``progress=None``: a bar for long work in a terminal.
    """

    batched: bool = True
    num_proc: int = 1
    timeout: float | None = None
    progress: bool | None = None

    def __post_init__(self) -> None:
        if self.num_proc < 1:
            raise ConfigError(f"num_proc must be >= 1, got {self.num_proc}")
        if self.timeout is not None and self.timeout <= 0:
            raise ConfigError(f"timeout must be > 0 seconds, got {self.timeout}")


def encode_rows(
    template: Template,
    rows: Iterable[SourceRow],
    report: RowReport,
    stage: Stage,
    options: EncodeOptions,
    add_generation_prompt: bool = False,
    total: int | None = None,
    note_columns: bool = False,
) -> Iterator[tuple[list[RowKey], EncodedChunk]]:
    """Chunks of rows and their features, in order. Rows that give none are reported; ``total``: how many rows there are.
    ``note_columns``: the rows are as they were read, so a column that nothing reads is worth a word.

    Raises DataError at the first bad row of the order, whether it cannot be read or cannot be encoded.
    """
    stage.how = "split" if template.truncation_strategy == "split" else f"cut ({template.truncation_strategy})"
    chunks = _chunks(rows, CHUNK if options.batched else 1)
    deadline = None if options.timeout is None else time.monotonic() + options.timeout
    with _bar(total, options.progress) as advance:
        for keys, chunk in _encoded(template, chunks, add_generation_prompt, options.num_proc):
            stage.total += len(keys)
            for i, reason in chunk.errors:
                report.bad(stage, keys[i][1], reason)
            for i, reason in chunk.dropped:
                report.drop(stage, keys[i][1], reason)
            for i in chunk.cut:
                stage.cut.add(keys[i][1], f"longer than max_length={template.max_length}")
            for i, token in chunk.control:
                stage.control.add(keys[i][1], token)
            for column, (count, first) in chunk.unread.items() if note_columns else ():
                stage.unread.add(keys[first][1], column, count)
            yield keys, chunk
            advance(len(keys))
            if deadline is not None and time.monotonic() > deadline:
                raise UserError(f"encoding took longer than timeout={options.timeout} s ({stage.total} rows were done)")


def encode_chunk(template: Template, rows: Sequence[Any], add_generation_prompt: bool) -> EncodedChunk:
    pairs = template.pairs and not add_generation_prompt
    if pairs:
        all_results = encode_pairs(template, rows)
    else:
        all_results = _encode_single(template, rows, add_generation_prompt)
    tokens = [t for result in all_results for t in result.tokens]
    return EncodedChunk(
        ids=np.concatenate([t.ids for t in tokens]) if tokens else np.empty(0, np.int32),
        trained=np.concatenate([t.trained for t in tokens]) if tokens else np.empty(0, bool),
        lengths=[len(t.ids) for t in tokens],
        counts=[len(result.tokens) for result in all_results],
        dropped=[(i, result.dropped) for i, result in enumerate(all_results) if result.dropped is not None],
        errors=[(i, str(result.error)) for i, result in enumerate(all_results) if result.error is not None],
        cut=[i for i, result in enumerate(all_results) if result.cut],
        control=[(i, result.control) for i, result in enumerate(all_results) if result.control is not None],
        unread=_unread(rows, all_results, unread_beside_pairs if pairs else unread_columns),
    )


def _unread(
    rows: Sequence[Any], results: Sequence[RowResult], unread: Callable[[dict[str, Any]], list[str]]
) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for i, (row, result) in enumerate(zip(rows, results, strict=True)):
        for column in unread(row) if result.error is None else ():
            count, first = found.get(column, (0, i))
            found[column] = (count + 1, first)
    return found


def _encode_single(template: Template, rows: Sequence[Any], add_generation_prompt: bool) -> list[RowResult]:
    errors: dict[int, DataError] = {}
    trainable: list[Any] = []
    for i, row in enumerate(rows):
        try:
            trainable.append(to_trainable(row, add_generation_prompt, train_context=template.train_on == "all"))
        except DataError as exc:
            errors[i] = exc
    results = iter(template.encode_rows(trainable, add_generation_prompt))
    return [RowResult(error=errors[i]) if i in errors else next(results) for i in range(len(rows))]


def _chunks(rows: Iterable[SourceRow], size: int) -> Iterator[list[SourceRow]]:
    """An error of the source comes after the rows that stand before it."""
    chunk: list[SourceRow] = []
    try:
        for row in rows:
            chunk.append(row)
            if len(chunk) == size:
                yield chunk
                chunk = []
    except UserError:
        if chunk:
            yield chunk
        raise
    if chunk:
        yield chunk


def _encoded(
    template: Template, chunks: Iterator[list[SourceRow]], add_generation_prompt: bool, num_proc: int
) -> Iterator[tuple[list[RowKey], EncodedChunk]]:
    first = next(chunks, None)
    if first is None:
        return
    second, failure = None, None
    if num_proc > 1:
        try:
            second = next(chunks, None)
        except UserError as exc:
            failure = exc
    if second is None:  # one chunk is not worth a process, whose start takes seconds
        for chunk in chain([first], () if failure else chunks):
            yield _keys(chunk), encode_chunk(template, [row.row for row in chunk], add_generation_prompt)
        if failure is not None:
            raise failure
        return
    chunks = chain([first, second], chunks)
    # spawn: forking after torch or the tokenizer has started threads can deadlock.
    context = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(num_proc, context, _start_worker, (template, add_generation_prompt)) as pool:
            try:
                yield from _in_order(chunks, lambda rows: pool.submit(_encode_in_worker, rows), _AHEAD * num_proc)
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
    except BrokenProcessPool as exc:
        raise UserError(
            f"encoding with num_proc={num_proc} lost a worker process: out of memory, or a script whose top-level code is not "
            'under `if __name__ == "__main__":` (starting a process imports the script again)'
        ) from exc


def _in_order(
    chunks: Iterator[list[SourceRow]], submit: Callable[[list[Any]], Any], ahead: int
) -> Iterator[tuple[list[RowKey], EncodedChunk]]:
    """Results in the order of the chunks, at most ``ahead`` of which are held; an error of the source comes in its place."""
    waiting: deque[tuple[list[RowKey], Any]] = deque()
    failure: UserError | None = None
    more = True
    while more or waiting:
        while more and len(waiting) < ahead:
            try:
                chunk = next(chunks, None)
            except UserError as exc:
                chunk, failure = None, exc
            more = chunk is not None
            if chunk is not None:
                waiting.append((_keys(chunk), submit([row.row for row in chunk])))
        if waiting:
            keys, result = waiting.popleft()
            yield keys, result.result()
    if failure is not None:
        raise failure


def _keys(chunk: list[SourceRow]) -> list[RowKey]:
    return [(row.number, row.origin) for row in chunk]


_WORKER: dict[str, Any] = {}  # template and mode of this worker process


def _start_worker(template: Template, add_generation_prompt: bool) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread a process: the processes are the parallelism
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches all; what it means is up to the parent
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    _WORKER.update(template=template, add_generation_prompt=add_generation_prompt)


def _end_with_parent() -> None:
    """A parent that was killed says nothing; its workers would wait for work for ever."""
    wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


def _encode_in_worker(rows: Sequence[Any]) -> EncodedChunk:
    return encode_chunk(_WORKER["template"], rows, _WORKER["add_generation_prompt"])


@contextmanager
def _bar(total: int | None, show: bool | None) -> Iterator[Callable[[int], None]]:
    """Calls ``advance(rows)``. ``show=None``: in a terminal, once many rows are done or known to come."""
    wanted = show if show is not None else sys.stderr.isatty()
    if not wanted:
        yield lambda rows: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("encoding rows"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    progress = Progress(*columns, console=Console(stderr=True), transient=True)
    task = progress.add_task("", total=total)

    def advance(rows: int) -> None:
        progress.advance(task, rows)
        if not progress.live.is_started and progress.tasks[0].completed >= _SHOW_PROGRESS_FROM:
            progress.start()

    if show or (total or 0) >= _SHOW_PROGRESS_FROM:
        progress.start()
    try:
        yield advance
    finally:
        progress.stop()
