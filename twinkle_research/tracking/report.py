"""report.html: one file, no outside resource, for one run or for several side by side."""

from __future__ import annotations

import argparse
import json
import sys
import time
from importlib import resources
from pathlib import Path
from typing import Any

from twinkle_research.errors import UserError
from twinkle_research.tracking import page
from twinkle_research.tracking.charts import charts, progress_axes
from twinkle_research.tracking.files import write_atomic
from twinkle_research.tracking.rundata import RunData, find_runs, load_runs
from twinkle_research.tracking.sweeppage import SweepJobs, load_jobs, sweep_section

# Characters of answers in the page. Beyond it, evaluations between the first and the last are left out.
MAX_SAMPLE_CHARACTERS = 600_000


def write_report(
    folders: list[Path],
    out: Path,
    *,
    state: str | None = None,
    objective: float | None = None,
    error: BaseException | None = None,
) -> Path:
    """Writes the page for the run folders and returns ``out``.

    state, objective, error: how the run is about to end, where its status.json does not say so yet.

    Raises UserError where a folder holds no run or a file in it cannot be read.
    """
    runs = load_runs(find_runs(folders))
    if state is not None:
        now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        runs[0].status = runs[0].status | {"state": state, "objective": objective, "time": now}
        if error is not None:
            runs[0].status["message"] = f"{type(error).__name__}: {error}" if not isinstance(error, UserError) else str(error)
    sweep = load_jobs(folders[0]) if len(folders) == 1 else None
    write_atomic(out, build_page(runs, sweep).encode("utf-8", errors="replace"))
    return out


def build_page(runs: list[RunData], sweep: SweepJobs | None = None) -> str:
    data = {
        "runs": [{"name": run.name, "axes": progress_axes(run)} for run in runs],
        "charts": charts(runs),
        "samples": [sample_groups(run) for run in runs],
    }
    script = "\n".join(asset(name) for name in ("report_tools.js", "report_charts.js", "report_page.js"))
    return page.document(
        title=runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared",
        body=page.body(runs, data["charts"], any(data["samples"]), sweep_section(sweep, runs) if sweep is not None else ""),
        data=embed(data),
        style=asset("report.css"),
        script=f'"use strict";\n(() => {{\n{script}}})();\n',
    )


def asset(name: str) -> str:
    return (resources.files("twinkle_research.tracking") / name).read_text(encoding="utf-8")


def embed(data: Any) -> str:
    """JSON that can stand in a script element: no ``<`` can end it, whatever a model has written."""
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def sample_groups(run: RunData) -> list[dict[str, Any]]:
    """``[{"step": ..., "rows": [{"prompt", "completion", "more": {name: text}}]}]``, by step."""
    steps: dict[int, list[dict[str, Any]]] = {}
    for row in run.samples:
        more = {name: str(value) for name, value in row.items() if name not in ("step", "prompt", "completion")}
        sample = {"prompt": as_text(row.get("prompt")), "completion": as_text(row.get("completion")), "more": more}
        steps.setdefault(row["step"], []).append(sample)
    order = sorted(steps)
    size = {step: len(json.dumps(steps[step])) for step in order}
    while sum(size[step] for step in order) > MAX_SAMPLE_CHARACTERS and len(order) > 2:
        del order[1:-1:2]
    return [{"step": step, "rows": steps[step]} for step in order]


def as_text(value: Any) -> str:
    """A prompt may be a list of messages."""
    if isinstance(value, list):
        return "\n".join(f"{m.get('role', '')}: {m.get('content', '')}" if isinstance(m, dict) else str(m) for m in value)
    return "" if value is None else str(value)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m twinkle_research.report",
        description="Writes report.html for a run, or one page that compares several. A folder of runs stands for them all.",
    )
    parser.add_argument("run_dir", nargs="+", type=Path)
    parser.add_argument("-o", "--out", type=Path, help="default: report.html in the folder; comparison.html here for several")
    options = parser.parse_args(arguments)
    out = options.out or (options.run_dir[0] / "report.html" if len(options.run_dir) == 1 else Path("comparison.html"))
    try:
        print(write_report(options.run_dir, out))
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
