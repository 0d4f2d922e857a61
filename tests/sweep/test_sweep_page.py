"""The page of a sweep: its jobs, the best first, and the parallel coordinates."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from twinkle_research.errors import UserError
from twinkle_research.tracking.report import write_report
from twinkle_research.tracking.sweeppage import axis_of, load_jobs

OBJECTIVES = {0: 0.5, 1: 0.9, 2: None, 3: 0.7}


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    jobs = []
    for number, objective in OBJECTIVES.items():
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.yaml").write_text(f"seed: {number}\n")
        (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "loss": 0.5}\n')
        words = ["model=tiny", f"optimizer.lr={10.0**-number}", f"loss={'ab'[number % 2]}"]
        state = "finished" if objective else "failed"
        jobs.append(
            {
                "number": number, "overrides": words, "state": state,
                "objective": objective, "step": 2, "seconds": 61.0, "error": None if objective else "<no room> & more",
            }
        )  # fmt: skip
    stored = {"metric": "eval/accuracy", "direction": "maximize", "keys": ["optimizer.lr", "loss"], "jobs": jobs}
    (tmp_path / "sweep.json").write_text(json.dumps(stored))
    return tmp_path


def test_the_best_job_comes_first(sweep: Path) -> None:
    text = write_report([sweep], sweep / "report.html").read_text()
    table = re.search(r'<table id="jobs">.*?</table>', text, re.DOTALL).group()
    assert re.findall(r'<th scope="row">.*?(\d)</th>', table) == ["1", "3", "0", "2"]
    assert table.count('title="best job"') == 1 and table.index('title="best job"') < table.index("0.9")
    assert "&lt;no room&gt; &amp; more" in table and "0:01:01" in table
    assert text.count("<polyline") == 3 and text.count('class="leader"') == 1  # a job without an objective has no line
    assert "job 1: optimizer.lr=0.1, loss=b; eval/accuracy 0.9" in text
    assert 'data-chart="0"' in text  # the curves
    assert not re.search(r'(?:src|href)="', text), "nothing is loaded from elsewhere"


def test_where_lower_is_better_the_order_turns(sweep: Path) -> None:
    stored = json.loads((sweep / "sweep.json").read_text()) | {"direction": "minimize"}
    (sweep / "sweep.json").write_text(json.dumps(stored))
    assert [job["number"] for job in load_jobs(sweep).jobs] == [0, 3, 1, 2]


def test_axes() -> None:
    assert axis_of("lr", ["1e-5", "1e-3", "1e-1"]).places == pytest.approx([0.0, 0.5, 1.0])  # by their logarithms
    assert axis_of("r", ["4", "8", "16"]).places == pytest.approx([0.0, 1 / 3, 1.0])
    assert axis_of("loss", ["grpo", "rloo", "grpo"]).places == [0.25, 0.75, 0.25]
    assert axis_of("x", ["null", "1", "2"]).ticks == [(1 / 6, "null"), (0.5, "1"), (5 / 6, "2")]
    assert axis_of("same", ["3", "3"]).places == [0.5, 0.5]
    assert axis_of("down", ["-1", "0", "1"]).places == [0.0, 0.5, 1.0]


def test_a_damaged_plan_is_named(sweep: Path) -> None:
    (sweep / "sweep.json").write_text("{}")
    with pytest.raises(UserError, match=r"sweep\.json cannot be read"):
        write_report([sweep], sweep / "report.html")
