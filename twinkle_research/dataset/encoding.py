"""Encoding of many rows, in this process or several, and the compact store of the result."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from twinkle_research.data_format import InputFeature
from twinkle_research.dataset.formats import to_trainable
from twinkle_research.errors import DataError, UserError
from twinkle_research.template.base import RowResult, Template, to_feature
from twinkle_research.template.tokens import Tokens

CHUNK = 256  # rows tokenised together, and sent to a worker together
_SHOW_PROGRESS_FROM = 4000  # rows


@dataclass
class EncodedChunk:
    """``CHUNK`` rows or fewer. Features of all rows one after the other; ``counts[i]``: how many row i gave.

    ``dropped`` and ``errors`` hold (position of the row in the chunk, reason), ``cut`` the positions of cut or split rows.
    """

    ids: np.ndarray
    trained: np.ndarray
    lengths: list[int]
    counts: list[int]
    dropped: list[tuple[int, str]] = field(default_factory=list)
    errors: list[tuple[int, str]] = field(default_factory=list)
    cut: list[int] = field(default_factory=list)


class FeatureStore:
    """Features as two flat arrays (5 bytes a token); lists are made when a row is asked for."""

    def __init__(self, ids: np.ndarray, trained: np.ndarray, lengths: Sequence[int], rows: list[str]):
        self.ids = ids  # int32 [tokens]
        self.trained = trained  # bool [tokens]
        self.bounds = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)  # [features + 1]
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def feature(self, index: int) -> InputFeature:
        part = slice(self.bounds[index], self.bounds[index + 1])
        return to_feature(Tokens(self.ids[part], self.trained[part]), self.rows[index])

    def take(self, order: np.ndarray) -> FeatureStore:
        parts = [slice(self.bounds[i], self.bounds[i + 1]) for i in order]
        empty = np.empty(0, np.int32)
        ids = np.concatenate([self.ids[p] for p in parts]) if parts else empty
        trained = np.concatenate([self.trained[p] for p in parts]) if parts else empty.astype(bool)
        return FeatureStore(ids, trained, [p.stop - p.start for p in parts], [self.rows[i] for i in order])


def encode_chunk(template: Template, rows: Sequence[Any], add_generation_prompt: bool) -> EncodedChunk:
    errors: dict[int, str] = {}
    trainable: list[Any] = []
    for i, row in enumerate(rows):
        try:
            trainable.append(to_trainable(row, prompt_only=add_generation_prompt))
        except DataError as exc:
            errors[i] = str(exc)
    results = iter(template.encode_rows(trainable, add_generation_prompt))
    all_results = [RowResult(error=DataError(errors[i])) if i in errors else next(results) for i in range(len(rows))]
    tokens = [t for result in all_results for t in result.tokens]
    return EncodedChunk(
        ids=np.concatenate([t.ids for t in tokens]) if tokens else np.empty(0, np.int32),
        trained=np.concatenate([t.trained for t in tokens]) if tokens else np.empty(0, bool),
        lengths=[len(t.ids) for t in tokens],
        counts=[len(result.tokens) for result in all_results],
        dropped=[(i, result.dropped) for i, result in enumerate(all_results) if result.dropped is not None],
        errors=[(i, str(result.error)) for i, result in enumerate(all_results) if result.error is not None],
        cut=[i for i, result in enumerate(all_results) if result.cut],
    )


def encode_chunks(
    template: Template, rows: Sequence[Any], add_generation_prompt: bool, batched: bool, num_proc: int, progress: bool | None
) -> Iterator[EncodedChunk]:
    """Chunks in the order of the rows, whatever ``num_proc``."""
    size = CHUNK if batched else 1
    chunks = [rows[i : i + size] for i in range(0, len(rows), size)]
    if progress is None:
        progress = len(rows) >= _SHOW_PROGRESS_FROM and sys.stderr.isatty()
    workers = min(num_proc, len(chunks))
    with _bar(len(rows), progress) as advance:
        results = (
            (encode_chunk(template, chunk, add_generation_prompt) for chunk in chunks)
            if workers <= 1
            else _encode_in_processes(template, chunks, add_generation_prompt, workers)
        )
        for chunk, result in zip(chunks, results, strict=True):
            advance(len(chunk))
            yield result


def _encode_in_processes(
    template: Template, chunks: list[Any], add_generation_prompt: bool, workers: int
) -> Iterator[EncodedChunk]:
    # spawn: forking after torch or the tokenizer has started threads can deadlock.
    context = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(workers, context, _start_worker, (template, add_generation_prompt)) as pool:
            yield from pool.map(_encode_in_worker, chunks)
    except BrokenProcessPool as exc:
        raise UserError(
            f"encoding with num_proc={workers} lost a worker process: out of memory, or a script whose top-level code is not "
            'under `if __name__ == "__main__":` (starting a process imports the script again)'
        ) from exc


_WORKER: dict[str, Any] = {}  # template and mode of this worker process


def _start_worker(template: Template, add_generation_prompt: bool) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread a process: the processes are the parallelism
    _WORKER.update(template=template, add_generation_prompt=add_generation_prompt)


def _encode_in_worker(rows: Sequence[Any]) -> EncodedChunk:
    return encode_chunk(_WORKER["template"], rows, _WORKER["add_generation_prompt"])


@contextmanager
def _bar(total: int, show: bool):
    if not show:
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("encoding rows", total=total)
        yield lambda count: progress.advance(task, count)
