"""Rows on their way from a source: where each came from, and what became of those that are not trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from twinkle_research.dataset.formats import like_a_column
from twinkle_research.errors import ConfigError, DataError, nearest
from twinkle_research.symbols import construct, load_symbol

Row = dict[str, Any]


class Origin(NamedTuple):
    """``number``: physical line of a file (from 1) where ``is_line``, else the row's number (from 0)."""

    source: str
    number: int
    is_line: bool = False

    def __str__(self) -> str:
        return f"{self.source}:{self.number}" if self.is_line else f"{self.source}[{self.number}]"


OnBad = Callable[[Origin, str], None]  # (origin, reason); raises, or notes the row as skipped


def raise_bad_row(origin: Origin, reason: str) -> None:
    raise DataError(f"{origin}: {reason}")


class SourceRow(NamedTuple):
    """``number``: of the row that was read, from 0; several rows that a processor made of one share it."""

    number: int
    origin: Origin
    row: Row


@dataclass(frozen=True)
class DroppedRow:
    """A row that is not trained on, and why."""

    row: str
    reason: str


class ReasonCounts:
    """Rows by reason: how many, and the first few of each. Its size does not grow with the rows."""

    REASONS = 1000
    ROWS = 5

    def __init__(self) -> None:
        self.total = 0
        self.reasons: dict[str, tuple[int, list[Origin]]] = {}

    def add(self, origin: Origin, reason: str, times: int = 1) -> None:
        """``times``: rows with that reason, of which ``origin`` is the first."""
        self.total += times
        if reason in self.reasons or len(self.reasons) < self.REASONS:
            count, rows = self.reasons.get(reason, (0, []))
            self.reasons[reason] = (count + times, rows if len(rows) == self.ROWS else [*rows, origin])

    def text(self) -> str:
        """'' for no rows."""
        parts = [f"{count} {reason} ({_listed(rows, count)})" for reason, (count, rows) in self.reasons.items()]
        text = "; ".join(parts[:10])
        if len(parts) > 10:
            text += f"; and {len(parts) - 10}{' or' * (len(parts) == self.REASONS)} more reasons"
        return text

    def to_json(self, names: Sequence[str]) -> dict[str, Any]:
        """``names``: of the sources, which may be called otherwise when it is read again."""
        rows = {
            reason: [count, [[names.index(o.source), o.number, o.is_line] for o in origins]]
            for reason, (count, origins) in self.reasons.items()
        }
        return {"total": self.total, "reasons": rows}

    @classmethod
    def from_json(cls, stored: dict[str, Any], names: Sequence[str]) -> ReasonCounts:
        counts = cls()
        counts.total = stored["total"]
        for reason, (count, rows) in stored["reasons"].items():
            counts.reasons[reason] = (count, [Origin(names[source], number, is_line) for source, number, is_line in rows])
        return counts

    def rows_text(self) -> str:
        """The first rows, whatever the reason."""
        rows = [row for _, rows in self.reasons.values() for row in rows]
        return _listed(rows[: self.ROWS], self.total)


def _listed(rows: list[Origin], count: int) -> str:
    return ", ".join(map(str, rows)) + (", ..." if count > len(rows) else "")


_COUNTED = ("dropped", "cut", "control", "unread")  # fields of Stage


@dataclass
class Stage:
    """What one step (reading, a processor, encoding) did with the rows that came to it.

    ``cut``: rows of which a part, or pieces, are left; ``how`` they were cut. ``control``: rows whose own text has a control
    token, by that token. ``unread``: rows with a column that nothing reads, by its name.
    """

    name: str
    total: int = 0
    dropped: ReasonCounts = field(default_factory=ReasonCounts)
    cut: ReasonCounts = field(default_factory=ReasonCounts)
    how: str = ""
    control: ReasonCounts = field(default_factory=ReasonCounts)
    unread: ReasonCounts = field(default_factory=ReasonCounts)

    def to_json(self, names: Sequence[str]) -> dict[str, Any]:
        parts = {part: getattr(self, part).to_json(names) for part in _COUNTED}
        return {"name": self.name, "total": self.total, "how": self.how, **parts}

    @classmethod
    def from_json(cls, stored: dict[str, Any], names: Sequence[str]) -> Stage:
        parts = {part: ReasonCounts.from_json(stored[part], names) for part in _COUNTED}
        return cls(stored["name"], stored["total"], how=stored["how"], **parts)

    @property
    def counts(self) -> list[ReasonCounts]:
        return [getattr(self, part) for part in _COUNTED]

    def warnings(self) -> Iterator[str]:
        if self.dropped.total:
            yield f"{self.name} dropped {self.dropped.total} rows (of {self.total}): {self.dropped.text()}"
        if self.cut.total:
            reason = next(iter(self.cut.reasons))
            yield f"{self.name} {self.how} {self.cut.total} rows (of {self.total}) {reason}: {self.cut.rows_text()}"
        if self.control.total:
            yield (
                f"{self.control.total} rows (of {self.total}) have control tokens in their own text, which are tokenised as such"
                f": {self.control.text()}"
            )
        if self.unread.total:
            columns = [f"'{name}' ({count} rows{like_a_column(name)})" for name, (count, _) in self.unread.reasons.items()]
            yield f"columns that nothing reads: {', '.join(columns)}"


class RowReport:
    """What was left out and why. ``keep`` is called with each row that is left out.

    ``on_error``: "raise" ends at the first bad row with a DataError that names it; "skip" leaves bad rows out.
    """

    def __init__(self, on_error: str, keep: Callable[[Origin, str], None]):
        if on_error not in ("raise", "skip"):
            raise ConfigError(f"on_error={on_error!r}: {nearest(on_error, ('raise', 'skip'))}")
        self.on_error = on_error
        self.keep = keep
        self.stages: list[Stage] = []

    def stage(self, name: str) -> Stage:
        self.stages.append(Stage(name))
        return self.stages[-1]

    def bad(self, stage: Stage, origin: Origin, reason: str, cause: Exception | None = None) -> None:
        if self.on_error == "raise":
            raise DataError(f"{origin}: {reason}") from cause
        self.drop(stage, origin, reason)

    def drop(self, stage: Stage, origin: Origin, reason: str) -> None:
        stage.dropped.add(origin, reason)
        self.keep(origin, reason)

    def summary(self) -> str:
        return "; ".join(stage.dropped.text() for stage in self.stages if stage.dropped.total)

    def warnings(self) -> Iterator[str]:
        for stage in self.stages:
            yield from stage.warnings()


class Processor:
    """A row function by its name, class or itself: ``name`` for messages, called with one row.

    ``own`` is True for a class (not an object) of twinkle_research.dataset, whose code and arguments are known.
    """

    def __init__(self, function: Any, init_args: dict[str, Any] | None = None, key: str = "processor"):
        self.name = function if isinstance(function, str) else getattr(function, "__name__", repr(function))
        self.init_args = init_args or {}
        symbol = load_symbol(function, "twinkle_research.dataset.preprocessor", key)
        self.own = isinstance(symbol, type) and symbol.__module__.startswith("twinkle_research.dataset.")
        if isinstance(symbol, type):
            self.function = construct(symbol, key, **self.init_args)
        elif init_args:
            raise ConfigError(f"arguments {', '.join(init_args)} have no effect: {symbol!r} is a function, not a class")
        else:
            self.function = symbol

    def __call__(self, rows: Iterable[SourceRow], report: RowReport, stage: Stage) -> Iterator[SourceRow]:
        """Each row replaced by what the function returns for it: a row, a list of rows, or None to leave it out."""
        for number, origin, row in rows:
            stage.total += 1
            try:
                result = self.function(row)
            except DataError as exc:
                report.bad(stage, origin, str(exc), exc)
                continue
            except Exception as exc:  # the user's own code: whatever it raises is shown with the row that caused it
                report.bad(stage, origin, f"{self.name} failed: {type(exc).__name__}: {exc}", exc)
                continue
            results = [] if result is None else result if isinstance(result, list) else [result]
            if not results:
                report.drop(stage, origin, f"left out by {self.name}")
            for new in results:
                if not isinstance(new, dict):
                    raise DataError(
                        f"{origin}: {self.name} returned {type(new).__name__}; expected a row (dict), a list of rows, or None"
                    )
                yield SourceRow(number, origin, new)
