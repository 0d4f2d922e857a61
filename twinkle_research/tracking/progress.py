"""What a person sees while a run goes: a live bar in a terminal, plain lines elsewhere, messages whole in both."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, TextIO

from twinkle_research.tracking.config import Progress

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

# Shown of a row, in this order: name, label, format. Everything else is in the files.
SHOWN = (
    ("loss", "loss", ".3f"),
    ("reward/mean", "reward", ".3f"),
    ("eval/loss", "eval/loss", ".3f"),
    ("eval/accuracy", "eval/accuracy", ".3f"),
    ("lr", "lr", ".1e"),
)


def format_duration(seconds: float) -> str:
    """``H:MM:SS``, days as hours."""
    whole = max(0, round(seconds))
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def shown_values(row: dict[str, Any], timing: dict[str, Any]) -> list[str]:
    parts = [f"{label} {row[name]:{spec}}" for name, label, spec in SHOWN if isinstance(row.get(name), int | float)]
    speed = timing.get("tokens_per_second")
    return parts + ([f"{speed:,.0f} tok/s"] if speed is not None else [])


class Eta:
    """Remaining seconds from the wall time of the last steps, evaluation and saving included."""

    def __init__(self, window: int = 20):
        self._times: deque[tuple[int, float]] = deque(maxlen=window + 1)

    def update(self, step: int, total: int, step_seconds: float | None, now: float) -> float | None:
        self._times.append((step, now))
        first_step, first_time = self._times[0]
        if step > first_step:
            return (total - step) * (now - first_time) / (step - first_step)
        return (total - step) * step_seconds if step_seconds else None


class PlainProgress:
    """One line a step (or every ``log_every`` steps, evaluations and the last step always)."""

    def __init__(self, total: int, log_every: int, stream: TextIO | None = None):
        self.total = total
        self.log_every = max(1, log_every)
        self._stream = stream
        self._eta = Eta()
        self._lock = threading.Lock()

    def log_step(self, row: dict[str, Any], timing: dict[str, Any]) -> None:
        step = row["step"]
        eta = self._eta.update(step, self.total, timing.get("step_seconds"), time.monotonic())
        evaluated = any(name.startswith("eval/") for name in row)
        if step % self.log_every and step != self.total and not evaluated:
            return
        parts = [f"step {step}/{self.total}", *shown_values(row, timing)]
        if eta is not None and step < self.total:
            parts.append(f"eta {format_duration(eta)}")
        self.message("  ".join(parts))

    def message(self, text: str) -> None:
        stream = self._stream or sys.stdout
        with self._lock:  # one write, so that another thread's line cannot fall into it
            stream.write(text + "\n")
            stream.flush()

    def finish(self, state: str) -> None:
        """Nothing is left to close."""


class QuietProgress(PlainProgress):
    """Messages only."""

    def log_step(self, row: dict[str, Any], timing: dict[str, Any]) -> None:
        """The rows are in the files."""


class BarProgress:
    """A ``rich`` bar at the bottom of the terminal; messages and all other output appear above it."""

    def __init__(self, total: int):
        from rich.console import Console

        self.total = total
        self._eta = Eta()
        self._console = Console(file=sys.stdout, force_terminal=True, highlight=False)
        self._handlers: list[tuple[logging.StreamHandler, TextIO]] = []
        self._bar: RichProgress | None = None

    def log_step(self, row: dict[str, Any], timing: dict[str, Any]) -> None:
        step = row["step"]
        eta = self._eta.update(step, self.total, timing.get("step_seconds"), time.monotonic())
        left = f"eta {format_duration(eta)}" if eta is not None and step < self.total else ""
        if self._bar is None:
            self._start()
        values = shown_values(row, timing)
        while len("  ".join(values)) > self._room and len(values) > 1:
            values.pop(-2 if len(values) > 2 else -1)  # loss and speed go last
        self._bar.update(self._task, completed=step, values="  ".join(values), left=left)

    def message(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def finish(self, state: str) -> None:
        if self._bar is None:
            return
        self._bar.update(self._task, left=state)
        self._bar.stop()
        for handler, stream in self._handlers:
            handler.setStream(stream)
        self._bar = None

    def _start(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        wide = self._console.width >= 100
        bar = 24 if wide else 6
        columns = [
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=bar),
            TextColumn("{task.fields[values]}"),
            *([TimeElapsedColumn()] if wide else []),
            TextColumn("{task.fields[left]}", style="cyan"),
        ]
        others = len("step") + 2 * len(str(self.total)) + 1 + bar + (len("0:00:00") if wide else 0) + len("eta 00:00:00")
        self._room = self._console.width - others - len(columns)  # for the values; rich would shorten every column
        before = (sys.stdout, sys.stderr)
        self._bar = Progress(*columns, console=self._console, refresh_per_second=4)
        self._task = self._bar.add_task("train", total=self.total, values="", left="")
        self._bar.start()  # from here on sys.stdout and sys.stderr print above the bar
        self._redirect_logging(*before)

    def _redirect_logging(self, stdout: TextIO, stderr: TextIO) -> None:
        """Handlers made before the bar hold the raw streams and would write into its line."""
        loggers = [logging.getLogger(), *map(logging.getLogger, list(logging.Logger.manager.loggerDict))]
        for handler in {h for logger in loggers for h in logger.handlers}:
            if isinstance(handler, logging.StreamHandler) and handler.stream in (stdout, stderr):
                self._handlers.append((handler, handler.stream))
                handler.setStream(sys.stdout if handler.stream is stdout else sys.stderr)


def build_progress(kind: Progress, total: int, log_every: int) -> BarProgress | PlainProgress:
    """``auto`` is the bar where stdout is a terminal."""
    if kind is Progress.none:
        return QuietProgress(total, log_every)
    if kind is Progress.bar or (kind is Progress.auto and sys.stdout.isatty()):
        return BarProgress(total)
    return PlainProgress(total, log_every)
