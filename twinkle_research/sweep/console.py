"""What a sweep shows on a terminal."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from twinkle_research.sweep.folder import Sweep, SweepJob
from twinkle_research.tracking.progress import format_duration

if TYPE_CHECKING:
    from rich.table import Table

_COLOURS = {"finished": "green", "running": "cyan", "failed": "red", "killed": "red", "stopped": "yellow"}
# Of the words that each job has, a table shows those that differ.
_BEST_ROWS = 5


def figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.6g}"


def words_of(sweep: Sweep, job: SweepJob) -> str:
    """The overrides that are swept; all where none of them is known."""
    swept = [short(word) for word in job.overrides if word.lstrip("+").partition("=")[0] in sweep.plan.keys]
    return " ".join(swept or job.overrides)


def short(word: str) -> str:
    """A number that a study has drawn has more digits than one reads."""
    key, _, value = word.partition("=")
    return f"{key}={float(value):.4g}" if re.fullmatch(r"-?\d+\.\d{6,}(e-?\d+)?", value) else word


def objective_name(sweep: Sweep) -> str:
    if sweep.plan.metric is None:
        return "objective"
    return f"{sweep.plan.metric} ({'higher' if sweep.plan.direction == 'maximize' else 'lower'} is better)"


def job_table(sweep: Sweep, jobs: list[SweepJob]) -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name, justify in (
        ("job", "right"),
        ("state", "left"),
        ("steps", "right"),
        ("time", "right"),
        (objective_name(sweep), "right"),
    ):
        table.add_column(name, justify=justify)
    table.add_column("settings", overflow="fold")
    for job in jobs:
        state = f"[{_COLOURS.get(job.state, 'dim')}]{job.state}[/]"
        time = format_duration(job.seconds) if job.seconds is not None else "–"
        words = escape(words_of(sweep, job)) + (f"\n[red]{escape(job.error)}[/]" if job.error else "")
        table.add_row(str(job.number), state, str(job.step or 0), time, figure(job.objective), words)
    return table


def rendered(*parts: Any) -> str:
    """As text: for a terminal with its colours, for a file without."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=False)
    with console.capture() as capture:
        for part in parts:
            console.print(part, soft_wrap=isinstance(part, str))
    return capture.get().rstrip("\n")


def summary(sweep: Sweep) -> str:
    counts = ", ".join(f"{count} {state}" for state, count in sweep.counts().items())
    return f"{sweep.path}: {sweep.state}; {counts or 'no job'}"


def status_text(sweep: Sweep) -> str:
    from rich.markup import escape

    return rendered(f"[bold]{escape(summary(sweep))}[/]", job_table(sweep, [sweep.jobs[number] for number in sorted(sweep.jobs)]))


def closing_text(sweep: Sweep) -> str:
    """The best jobs, and where everything is."""
    from rich.markup import escape

    best = sweep.ranked()
    parts: list[Any] = [f"[bold]{escape(summary(sweep))}[/]"]
    if best:
        parts += [job_table(sweep, best[:_BEST_ROWS]), f"best job    {escape(str(sweep.folder(best[0].number)))}"]
    if (sweep.path / "report.html").is_file():
        parts.append(f"report      {escape(str(sweep.path / 'report.html'))}")
    if not sweep.is_complete():
        parts.append(f"to go on    python -m twinkle_research.sweep resume {escape(str(sweep.path))}")
    return rendered(*parts)
