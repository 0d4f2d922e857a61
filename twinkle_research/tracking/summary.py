"""What is printed when a run has ended: its curve and what the model answered before and after."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path

from twinkle_research.tracking.rundata import load_run

_BLOCKS = " ▁▂▃▄▅▆▇█"
_ANSWER_LINES = 3
_MIN_POINTS = 8  # fewer make no curve
_PROMPTS = 8


def closing_summary(folder: Path) -> str:
    """Text for a terminal. Empty where the run has no curve and no answers. Of a run with rewards their mean is the curve: its
    loss says little."""
    width = min(shutil.get_terminal_size().columns, 110)
    run = load_run(folder)
    name, title = ("reward/mean", "mean reward") if any("reward/mean" in row for row in run.metrics) else ("loss", "loss")
    points = [(row["step"], row[name]) for row in run.metrics if row.get(name) is not None]
    parts = [curve(title, points, width - 12)] if len(points) >= _MIN_POINTS else []
    return "\n".join([*parts, *answers(run.samples, width)])


def curve(title: str, points: Sequence[tuple[int, float]], width: int, height: int = 6) -> str:
    """``points`` of (step, value) as columns of blocks, each the mean of its share of the steps."""
    columns = min(width, len(points))
    bounds = [round(i * len(points) / columns) for i in range(columns + 1)]
    means = [sum(v for _, v in points[a:b]) / (b - a) for a, b in zip(bounds[:-1], bounds[1:], strict=True)]
    low, high = min(means), max(means)
    eighths = [1 + round((v - low) / ((high - low) or 1.0) * (8 * height - 1)) for v in means]
    lines = []
    for level in reversed(range(height)):
        label = f"{high:8.3f}" if level == height - 1 else f"{low:8.3f}" if level == 0 else " " * 8
        lines.append(f"{label} │" + "".join(_BLOCKS[min(8, max(0, e - 8 * level))] for e in eighths))
    first, last = str(points[0][0]), str(points[-1][0])
    axis = f"{first}{last:>{max(columns - len(first), len(last) + 1)}}"
    return "\n".join(["", f"{title} over the steps", *lines, " " * 8 + " └" + "─" * columns, " " * 10 + axis])


def answers(samples: Sequence[dict], width: int) -> list[str]:
    """Prompts with their first and their last answer, cut to a few lines: those that were asked more than once, if there are
    any (of those that were trained on each is asked once)."""
    lines = []
    by_prompt: dict[str, list[dict]] = {}
    for row in samples:  # a prompt may also be a list of messages
        by_prompt.setdefault(str(row["prompt"]), []).append(row)
    again = {prompt: rows for prompt, rows in by_prompt.items() if rows[0]["step"] != rows[-1]["step"]}
    for prompt, rows in list((again or by_prompt).items())[:_PROMPTS]:
        lines += ["", f"> {textwrap.shorten(prompt, width - 2)}"]
        for label, row in (("before", rows[0]), ("after", rows[-1])):
            if label == "before" and row["step"] == rows[-1]["step"]:
                continue
            text = textwrap.wrap(row["completion"], width - 10, max_lines=_ANSWER_LINES, placeholder=" ...") or ["(nothing)"]
            lines += [f"  {label if i == 0 else '':<7} {line}" for i, line in enumerate(text)]
    return lines
