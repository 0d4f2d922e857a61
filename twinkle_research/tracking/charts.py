"""From the rows of runs to the curves of a report: which metrics, in which order, and few enough points to draw."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from twinkle_research.tracking.rundata import RunData

Point = tuple[int, float | None]

# Points of one curve in the page. Longer curves keep the least and greatest value of each stretch, so no spike is lost.
MAX_POINTS = 3000
MAX_POINTS_TOGETHER = 40000


@dataclass(frozen=True)
class MetricInfo:
    """What a metric is for a reader.

    better: -1 when lower is better, 1 when higher is, 0 when neither is. mean: the mean of the steps says more than the last.
    """

    hint: str = ""
    better: int = 0
    mean: bool = False


KNOWN = {
    "loss": MetricInfo("training loss of the step", -1),
    "eval/loss": MetricInfo("loss on the evaluation rows", -1),
    "eval/perplexity": MetricInfo("exp of eval/loss", -1),
    "eval/accuracy": MetricInfo("greedy answers that are right; of pairs those whose chosen answer leads", 1),
    "eval/rewards/margins": MetricInfo("lead of the chosen answers on the evaluation pairs", 1),
    "rewards/margins": MetricInfo("lead of the chosen over the rejected answers", 1),
    "rewards/accuracies": MetricInfo("share of pairs whose chosen answer leads", 1),
    "reward/mean": MetricInfo("mean reward of the step", 1),
    "reward/std": MetricInfo("spread of the rewards"),
    "entropy": MetricInfo("of the policy, nats per token"),
    "completion/length_mean": MetricInfo("tokens of an answer"),
    "completion/truncated": MetricInfo("share of answers cut off", -1),
    "lr": MetricInfo("learning rate that the step used"),
    "grad_norm": MetricInfo("before clipping"),
    "tokens": MetricInfo("trained tokens of the step"),
    "tokens_per_second": MetricInfo("all tokens through the model", 1, mean=True),
    "step_seconds": MetricInfo("wall time of the step", -1, mean=True),
    "memory/peak_gib": MetricInfo("peak so far, GiB"),
    "mfu": MetricInfo("share of the device's peak FLOP/s", 1, mean=True),
}


def info(metric: str) -> MetricInfo:
    if metric in KNOWN:
        return KNOWN[metric]
    return MetricInfo(better=1 if metric.startswith(("eval/mean@", "eval/pass@")) else 0)


def rank(metric: str) -> tuple[int, str]:
    """Known metrics in the order of KNOWN, then evaluations, then the rest by name."""
    order = list(KNOWN)
    if metric in KNOWN:
        return order.index(metric), ""
    return (order.index("eval/accuracy") if metric.startswith("eval/") else len(order)), metric


def metric_names(rows: list[dict[str, Any]]) -> list[str]:
    """Names with at least one number in ``rows``, in the order of the report."""
    names = {name for row in rows for name, value in row.items() if name != "step" and is_number(value)}
    return sorted(names, key=rank)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def series(rows: list[dict[str, Any]], metric: str) -> list[Point]:
    """(step, value) of the rows that have the metric; None where it was not finite."""
    return [(row["step"], row[metric] if is_number(row[metric]) else None) for row in rows if metric in row]


def thin(points: list[Point], limit: int) -> list[Point]:
    """At most ``limit`` points: of each of ``limit // 2 - 1`` equal stretches the least and the greatest; both ends stay."""
    if len(points) <= limit:
        return points
    inner, stretches = points[1:-1], max(1, limit // 2 - 1)
    kept = [points[0]]
    for number in range(stretches):
        part = inner[number * len(inner) // stretches : (number + 1) * len(inner) // stretches]
        known = [p for p in part if p[1] is not None]
        if known:
            pair = (min(known, key=lambda p: p[1]), max(known, key=lambda p: p[1]))
            kept += sorted(set(pair))
        elif part:
            kept.append(part[0])
    return [*kept, points[-1]]


def short(value: float | None) -> float | None:
    """Six significant digits: what a screen can show."""
    return None if value is None else float(f"{value:.6g}")


def curve(run: int, points: list[Point], limit: int) -> dict[str, Any]:
    kept = thin(points, limit)
    return {"run": run, "x": [p[0] for p in kept], "y": [short(p[1]) for p in kept], "rows": len(points)}


def charts(runs: list[RunData]) -> list[dict[str, Any]]:
    """One chart a metric, with one curve for each run that has it. ``group``: learning or speed."""
    found = []
    for group, rows_of in (("learning", lambda run: run.metrics), ("speed", lambda run: run.timing)):
        names = metric_names([row for run in runs for row in rows_of(run)])
        found += [(group, name, [series(rows_of(run), name) for run in runs]) for name in names]
    curves = sum(1 for _, _, lines in found for points in lines if points)
    limit = max(200, min(MAX_POINTS, MAX_POINTS_TOGETHER // max(1, curves)))
    return [
        {
            "metric": name,
            "group": group,
            "hint": info(name).hint,
            "curves": [curve(number, points, limit) for number, points in enumerate(lines) if points],
        }
        for group, name, lines in found
    ]


def progress_axes(run: RunData, limit: int = 1000) -> dict[str, list[float]]:
    """Trained tokens and wall seconds at some of the steps; the page interpolates between them."""
    seconds = {row["step"]: row.get("step_seconds") or 0.0 for row in run.timing}
    steps, tokens, elapsed = [0], [0.0], [0.0]
    for row in run.metrics:
        if row["step"] > 0:
            steps.append(row["step"])
            tokens.append(tokens[-1] + (row.get("tokens") or 0))
            elapsed.append(elapsed[-1] + seconds.get(row["step"], 0.0))
    chosen = range(len(steps)) if len(steps) <= limit else [i * (len(steps) - 1) // (limit - 1) for i in range(limit)]
    return {
        "steps": [steps[i] for i in chosen],
        "tokens": [short(tokens[i]) for i in chosen],
        "seconds": [short(elapsed[i]) for i in chosen],
    }


@dataclass(frozen=True)
class Summary:
    """A metric of one run in a few numbers. ``shown``: the last value, or the mean where MetricInfo says so."""

    first: float
    shown: float
    best: float | None
    best_step: int | None


def summarize(points: list[Point], metric: str) -> Summary | None:
    """None where no value is finite."""
    known = [(step, value) for step, value in points if value is not None]
    if not known:
        return None
    what = info(metric)
    best = min(known, key=lambda p: -what.better * p[1]) if what.better else (None, None)
    shown = sum(value for _, value in known) / len(known) if what.mean else known[-1][1]
    return Summary(known[0][1], shown, best[1], best[0])
