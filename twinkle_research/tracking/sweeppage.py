"""What the page of a sweep has beside that of several runs: its jobs, the best first, and parallel coordinates."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinkle_research.errors import UserError
from twinkle_research.tracking.page import esc, number, state_badge, swatch
from twinkle_research.tracking.progress import format_duration
from twinkle_research.tracking.rundata import SWEEP, RunData

# From this ratio of the largest to the smallest value an axis is logarithmic.
LOG_RATIO = 50.0
_WIDTH, _HEIGHT, _TOP, _BOTTOM, _SIDE = 1160, 300, 46, 22, 90


@dataclass
class SweepJobs:
    """``jobs``: as in sweep.json, those with an objective first, the best at their head."""

    metric: str | None
    direction: str | None
    keys: list[str]
    jobs: list[dict[str, Any]]

    def values(self, job: dict[str, Any]) -> dict[str, str]:
        """Swept key -> the value's text."""
        pairs = (word.partition("=") for word in job["overrides"])
        found = {key.lstrip("+"): value for key, _, value in pairs}
        return {key: found.get(key, "") for key in self.keys}

    def ranked(self) -> list[dict[str, Any]]:
        return [job for job in self.jobs if job["state"] == "finished" and job["objective"] is not None]


def load_jobs(folder: Path) -> SweepJobs | None:
    """None where ``folder`` is not that of a sweep."""
    file = folder / SWEEP
    if not file.is_file():
        return None
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
        better = -1.0 if stored["direction"] == "maximize" else 1.0
        jobs = sorted(
            stored["jobs"],
            key=lambda job: (
                job["state"] != "finished" or job["objective"] is None, better * (job["objective"] or 0.0), job["number"],
            ),
        )  # fmt: skip
        return SweepJobs(stored["metric"], stored["direction"], stored["keys"], jobs)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} cannot be read: {error!r}") from error


def sweep_section(sweep: SweepJobs, runs: list[RunData]) -> str:
    places = {run.path.name: index for index, run in enumerate(runs)}
    return jobs_table(sweep, places) + parallel_coordinates(sweep)


def jobs_table(sweep: SweepJobs, places: dict[str, int]) -> str:
    better = {"maximize": ", higher is better", "minimize": ", lower is better"}.get(sweep.direction or "", "")
    head = "".join(f'<th scope="col" class="num"><code>{esc(key)}</code></th>' for key in sweep.keys)
    body = []
    for place, job in enumerate(sweep.jobs):
        mark = swatch(places[str(job["number"])]) if str(job["number"]) in places else ""
        cells = "".join(f'<td class="num">{esc(shown(value))}</td>' for value in sweep.values(job).values())
        best = ' class="num best" title="best job"' if place == 0 and job in sweep.ranked() and sweep.metric else ' class="num"'
        time = format_duration(job["seconds"]) if job["seconds"] is not None else "–"
        body.append(
            f'<tr><th scope="row">{mark}{job["number"]}</th><td{best}>{number(job["objective"])}</td>{cells}'
            f'<td>{state_badge(job["state"])}</td><td class="num">{job["step"] or 0:,}</td><td class="num">{time}</td>'
            f"<td>{esc(job['error'] or '')}</td></tr>"
        )
    return (
        '<section><h2>Jobs</h2><div class="wide"><table id="jobs"><thead><tr><th scope="col">job</th>'
        f'<th scope="col" class="num">{esc(sweep.metric or "objective")}{better}</th>{head}<th scope="col">state</th>'
        '<th scope="col" class="num">steps</th><th scope="col" class="num">time</th><th scope="col">error</th></tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div></section>"
    )


def shown(text: str) -> str:
    """Numbers with the digits that one reads; other text as it is."""
    value = as_number(text)
    return text if value is None or len(text) < 8 else f"{value:.4g}"


def as_number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


# --- parallel coordinates ----------------------------------------------------------------------------------------------


@dataclass
class Axis:
    """``places``: of each job's value, 0 (bottom) to 1. ``ticks``: (place, text)."""

    name: str
    places: list[float]
    ticks: list[tuple[float, str]]


def axis_of(name: str, texts: list[str]) -> Axis:
    """Numbers by size, logarithmic where they differ by much; anything else evenly, in the order in which it comes."""
    numbers = [as_number(text) for text in texts]
    if any(value is None for value in numbers):
        order = list(dict.fromkeys(texts))
        spot = {text: (i + 0.5) / len(order) for i, text in enumerate(order)}
        return Axis(name, [spot[text] for text in texts], [(spot[text], text) for text in order])
    low, high = min(numbers), max(numbers)
    scale = math.log if low > 0 and high / low >= LOG_RATIO else float
    span = scale(high) - scale(low)
    places = [(scale(value) - scale(low)) / span if span else 0.5 for value in numbers]
    distinct = sorted(set(zip(places, numbers, strict=True)))
    ticks = distinct if len(distinct) <= 6 else [distinct[0], distinct[-1]]
    return Axis(name, places, [(place, f"{value:.4g}") for place, value in ticks])


def parallel_coordinates(sweep: SweepJobs) -> str:
    """One line a finished job, over an axis for each swept key and the objective; the better, the stronger its colour."""
    jobs = sweep.ranked()
    if len(jobs) < 2 or not sweep.keys or sweep.metric is None:
        return ""
    axes = [axis_of(key, [sweep.values(job)[key] for job in jobs]) for key in sweep.keys]
    axes.append(axis_of(sweep.metric, [repr(job["objective"]) for job in jobs]))
    step = (_WIDTH - 2 * _SIDE) / (len(axes) - 1)
    height = _HEIGHT - _TOP - _BOTTOM
    drawn = []
    for place, job in reversed(list(enumerate(jobs))):  # the best is drawn last, above the others
        points = " ".join(f"{_SIDE + i * step:.1f},{_TOP + (1 - axis.places[place]) * height:.1f}" for i, axis in enumerate(axes))
        share = round(100 * (1 - place / (len(jobs) - 1)))
        words = ", ".join(f"{key}={shown(value)}" for key, value in sweep.values(job).items())
        title = f"job {job['number']}: {words}; {sweep.metric} {number(job['objective'])}"
        drawn.append(
            f'<polyline points="{points}" style="stroke: color-mix(in oklab, var(--good) {share}%, var(--grid))" '
            f'class="{"leader" if place == 0 else "job"}"><title>{esc(title)}</title></polyline>'
        )
    for i, axis in enumerate(axes):
        x = _SIDE + i * step
        drawn.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_TOP + height}"/>')
        drawn.append(f'<text class="axis" x="{x:.1f}" y="16" text-anchor="middle">{esc(axis.name)}</text>')
        for spot, text in axis.ticks:
            y = _TOP + (1 - spot) * height
            drawn.append(f'<text x="{x + 6:.1f}" y="{y + 4:.1f}">{esc(text[:22])}</text>')
    return (
        '<section><h2>Settings and objective</h2><figure class="parallel">'
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="parallel coordinates of the jobs">{"".join(drawn)}</svg>'
        "</figure></section>"
    )
