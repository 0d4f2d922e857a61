"""report.html of a sweep: the page that compares its runs."""

from __future__ import annotations

from pathlib import Path

from twinkle_research.sweep.folder import Sweep
from twinkle_research.tracking.report import write_report
from twinkle_research.tracking.rundata import is_run

REPORT = "report.html"


def write_page(sweep: Sweep) -> Path | None:
    """None where no job has a run yet."""
    if not any(is_run(sweep.folder(number).path) for number in sweep.jobs):
        return None
    return write_report([sweep.path], sweep.path / REPORT)
