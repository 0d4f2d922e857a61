"""The text at the end of a run: what it shows is what the files say."""

import json

from twinkle_research.tracking.summary import answers, closing_summary, curve


def test_curve_has_a_column_for_each_step_and_its_extremes():
    lines = curve("loss", [(step, 8.0 / step) for step in range(1, 9)], width=60).splitlines()[2:]
    bars = [line.split("│")[1] for line in lines if "│" in line]
    assert all(len(bar) == 8 for bar in bars)
    heights = [sum(bar[i] != " " for bar in bars) for i in range(8)]
    assert heights[0] == len(bars) and heights[-1] == 1 and heights == sorted(heights, reverse=True)
    assert lines[0].split()[0] == "8.000" and lines[len(bars) - 1].split()[0] == "1.000"
    assert lines[-1].split() == ["1", "8"]


def test_long_runs_are_averaged_into_the_width_and_equal_losses_are_drawn():
    bars = curve("loss", [(step, 1.0) for step in range(1, 1001)], width=40).splitlines()[-3]
    assert len(bars.split("│")[1]) == 40 and "1.000" in bars


def test_first_and_last_answer_of_each_prompt():
    rows = [{"step": s, "prompt": p, "completion": f"{p} at {s}"} for s in (0, 5, 9) for p in ("a", "b")]
    assert answers(rows, 80) == [
        "",
        "> a",
        "  before  a at 0",
        "  after   a at 9",
        "",
        "> b",
        "  before  b at 0",
        "  after   b at 9",
    ]
    assert answers(rows[:1], 80) == ["", "> a", "  after   a at 0"]
    assert answers([{"step": 1, "prompt": "a", "completion": ""}], 80)[-1].endswith("(nothing)")


def test_summary_of_a_folder(tmp_path):
    metrics = [{"step": 0, "eval/loss": 3.0}, {"step": 1, "loss": 2.0}, {"step": 2, "loss": None}]
    metrics += [{"step": step, "loss": 1.0} for step in range(3, 10)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    text = closing_summary(tmp_path)
    assert "2.000" in text and "1.000" in text and "3.000" not in text
