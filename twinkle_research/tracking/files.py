"""metrics.jsonl, timing.jsonl and samples.jsonl: one JSON object a line, appended as the run goes.

A kill can tear only the last line. A resumed run cuts each file back to its checkpoint's step, so that
metrics.jsonl ends byte-identical to that of an uninterrupted run.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from twinkle_research.errors import CheckpointError

METRICS = "metrics.jsonl"
TIMING = "timing.jsonl"
SAMPLES = "samples.jsonl"

# These come first in a row, in this order; all other names follow in alphabetical order.
FIRST = ("loss", "grad_norm", "lr", "tokens", "step_seconds", "tokens_per_second", "mfu", "memory/peak_gib")


def plain_value(name: str, value: Any) -> float | int | bool | str | None:
    """A metric as JSON has it. NaN and infinity, for which JSON has no word, become null.

    Raises TypeError for anything else, tensors included: the caller decides when to wait for a device.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        number = float(value)
        return number if math.isfinite(number) else None
    raise TypeError(f"metric '{name}' must be a number, a string or None, not {type(value).__name__}")


def plain_row(step: int, values: Mapping[str, Any]) -> dict[str, Any]:
    """``step`` first, then FIRST, then the rest by name: equal rows are equal bytes, whoever collected them."""
    rest = sorted(name for name in values if name not in FIRST and name != "step")
    names = [name for name in FIRST if name in values] + rest
    return {"step": step} | {name: plain_value(name, values[name]) for name in names}


def encode(row: Mapping[str, Any]) -> bytes:
    """One line. A lone surrogate in a sampled text becomes its JSON escape, which UTF-8 itself cannot hold."""
    return (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8", errors="backslashreplace")


def parse(path: Path, data: bytes) -> Iterable[tuple[int, dict[str, Any]]]:
    """(end of the line in bytes, row) of each whole line; a torn last line is left out.

    Raises CheckpointError, naming file and line, where a line before the last is not a row.
    """
    end = 0
    for number, line in enumerate(data.split(b"\n")[:-1], start=1):
        end += len(line) + 1
        try:
            row = json.loads(line)
        except ValueError as error:
            if end == len(data):
                return
            raise CheckpointError(f"{path}:{number}: not JSON ({error}): the file was changed or the disk lost data") from error
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise CheckpointError(f"{path}:{number}: a row must be an object with an integer 'step'")
        yield end, row


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file that may be missing or still be written to."""
    if not path.exists():
        return []
    return [row for _, row in parse(path, path.read_bytes())]


def write_atomic(path: Path, data: bytes) -> None:
    """Replaces ``path`` so that a reader or a crash finds either the old or the new content, never a part."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(partial, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def cut_back(path: Path, step: int) -> list[dict[str, Any]]:
    """Drops the rows after ``step`` and a torn last line, atomically; returns the rows kept.

    Step 0 keeps nothing: such a run starts again, and its evaluation before training makes row 0 anew.
    """
    if not path.exists():
        return []
    data = path.read_bytes()
    kept, end = [], 0
    for position, row in parse(path, data):
        if step == 0 or row["step"] > step:
            break
        kept.append(row)
        end = position
    if end < len(data):
        write_atomic(path, data[:end])
    return kept


class JsonLines:
    """Appends rows to one file; each is with the operating system when ``write`` returns."""

    def __init__(self, path: Path, resume_step: int):
        self.path = path
        self.kept = cut_back(path, resume_step)
        self._file = open(path, "ab")  # noqa: SIM115 (closed by close)

    def write(self, row: Mapping[str, Any]) -> None:
        self._file.write(encode(row))
        self._file.flush()

    def sync(self) -> None:
        """Makes all rows so far survive a power failure."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        if not self._file.closed:
            self.sync()
            self._file.close()


class RunFiles:
    """The three files of a run folder."""

    def __init__(self, folder: Path, resume_step: int):
        self.metrics = JsonLines(folder / METRICS, resume_step)
        self.timing = JsonLines(folder / TIMING, resume_step)
        self.samples = JsonLines(folder / SAMPLES, resume_step)
        self._last = self.metrics.kept[-1]["step"] if self.metrics.kept else -1
        self.missing = (self._last + 1, resume_step) if self._last < resume_step and resume_step else None

    def log_step(self, row: dict[str, Any], timing: dict[str, Any]) -> None:
        if row["step"] <= self._last:
            raise ValueError(f"step {row['step']} after step {self._last}: the rows of {self.metrics.path.name} must go up")
        self._last = row["step"]
        self.metrics.write(row)
        if len(timing) > 1:
            self.timing.write(timing)

    def log_samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            self.samples.write({"step": step} | row | {"step": step})

    def flush(self) -> None:
        for file in (self.metrics, self.timing, self.samples):
            file.sync()

    def finish(self, state: str) -> None:
        for file in (self.metrics, self.timing, self.samples):
            file.close()
