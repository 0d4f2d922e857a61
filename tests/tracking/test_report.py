"""report.html as a file: whole, small, safe, and right about what is in the run folders."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from tracked_run import ROOT, config, train

from twinkle_research.errors import UserError
from twinkle_research.tracking.build import build_tracker
from twinkle_research.tracking.charts import info, metric_names, progress_axes, series, summarize, thin
from twinkle_research.tracking.files import encode, plain_row
from twinkle_research.tracking.report import main, write_report
from twinkle_research.tracking.rundata import differing_keys, find_runs, flatten, load_run, load_runs

EVIL = '</script><script>window.hacked = 1</script><img src=x onerror="window.hacked = 2">&amp; "quoted" \u2028 \ud800'


def make_run(folder: Path, *, steps: int = 12, settings: str = "seed: 0\n", status: dict | None = None, evil: str = "") -> Path:
    """A finished run with an evaluation at every second step; its last report is the tracker's own."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(f"# settings\n{settings}schema:\n  model: base_hf\n", encoding="utf-8")
    tracker = build_tracker(config(tensorboard=False), folder, total_steps=steps, resume_step=0, wandb_run_id=None, is_main=True)
    train(tracker, 0, steps)
    if evil:
        tracker.log_samples(steps, [{"prompt": evil, "completion": evil, evil: evil}])
    tracker.finish("finished")
    if status is not None:
        (folder / "status.json").write_text(json.dumps(status))
    return folder


class Page(HTMLParser):
    """Checks the nesting of elements and collects scripts, text and attributes."""

    VOID = {"meta", "input", "br", "img", "link"}

    def __init__(self, html: str):
        super().__init__()
        self.open: list[str] = []
        self.scripts: list[str] = []
        self.tags: list[tuple[str, dict]] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts[-1] += data
        else:
            self.text += data

    @property
    def data(self) -> dict:
        return json.loads(self.scripts[0])


def read(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


def test_the_tracker_writes_it_at_the_end(tmp_path):
    page = read(make_run(tmp_path / "run") / "report.html")
    charts = {chart["metric"]: chart["curves"][0] for chart in page.data["charts"]}
    assert list(charts) == ["loss", "eval/loss", "lr", "grad_norm", "tokens", "tokens_per_second", "step_seconds"]
    assert charts["loss"]["x"] == list(range(13)) and charts["eval/loss"]["x"] == [0, 2, 4, 6, 8, 10, 12]
    assert [group["step"] for group in page.data["samples"][0]] == [0, 2, 4, 6, 8, 10, 12]
    assert "finished" in page.text and "seed: 0" in page.text


def test_it_needs_nothing_from_outside(tmp_path):
    html = (make_run(tmp_path / "run") / "report.html").read_text()
    page = Page(html)
    assert not [(tag, attrs) for tag, attrs in page.tags if {"src", "href"} & attrs.keys() or tag in ("link", "img", "iframe")]
    assert "default-src 'none'" in html and "url(" not in page.text and "@import" not in html
    addresses = set(re.findall(r"https?://[\w./]+", html))
    assert addresses == {"http://www.w3.org/2000/svg"}  # the name of a language, not a place


def test_every_text_is_escaped(tmp_path):
    run = make_run(
        tmp_path / "<b>run<i>",
        settings=f"data:\n  path: {json.dumps(EVIL[:-1])}\nmodel:\n  name: '<script>x</script>'\n",
        status={"state": "failed", "message": EVIL[:-1], "traceback": EVIL[:-1]},
        evil=EVIL,
    )
    main([str(run), str(make_run(tmp_path / "other", settings="data:\n  path: <i>\n")), "-o", str(tmp_path / "two.html")])
    main([str(run)])
    for path in (run / "report.html", tmp_path / "two.html"):
        page = read(path)
        assert len(page.scripts) == 2 and "hacked" not in page.scripts[1]
        assert not {tag for tag, _ in page.tags} & {"img", "b", "i"} and "<b>run<i>" in page.text
    rows = page.data["samples"][0][-1]["rows"]
    assert rows[-1]["completion"] == EVIL and rows[-1]["more"] == {EVIL: EVIL}


def test_failure_and_traceback_are_shown(tmp_path):
    status = {"state": "failed", "message": "loss is nan in rows a.jsonl:3", "traceback": "Traceback (most recent call last)"}
    run = make_run(tmp_path / "run", status=status)
    write_report([run], run / "report.html")
    assert all(text in read(run / "report.html").text for text in ("failed", "loss is nan in rows a.jsonl:3", "most recent call"))


def test_a_failing_run_reports_its_error(tmp_path, capsys):
    tracker = build_tracker(config(), tmp_path, total_steps=9, resume_step=0, wandb_run_id=None, is_main=True)
    train(tracker, 1, 2)
    try:
        raise UserError("rows a.jsonl:3 make the loss nan")
    except UserError:
        tracker.finish("failed")
    text = read(tmp_path / "report.html").text
    assert "rows a.jsonl:3 make the loss nan" in text and "failed" in text


def test_an_unwritable_report_does_not_fail_the_run(tmp_path, capsys):
    tracker = build_tracker(config(), tmp_path, total_steps=9, resume_step=0, wandb_run_id=None, is_main=True)
    train(tracker, 1, 2)
    (tmp_path / "report.html").mkdir()
    tracker.finish("finished")
    assert "report.html could not be written" in capsys.readouterr().out


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_a_run_that_has_hardly_begun(tmp_path, kept):
    """No row, a torn row, one row; no config and no status yet."""
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1, "loss": 2.0}\n{"step": 2, "lo'[: (0, 10, 40)[kept]])
    write_report([tmp_path], tmp_path / "report.html")
    page = read(tmp_path / "report.html")
    assert len(page.data["charts"]) == (1 if kept == 2 else 0)
    assert kept == 2 or "No step has been recorded yet" in page.text


def test_long_runs_stay_small_and_keep_their_spikes(tmp_path):
    """100,000 steps: under 2 MB, and the one spike is still there."""
    rows = [{"loss": 2 + math.sin(s / 500), "grad_norm": 1.0, "lr": 1e-4, "tokens": 10} for s in range(1, 100_001)]
    rows[56_789]["loss"] = 50.0
    lines = [encode(plain_row(step, row)) for step, row in enumerate(rows, start=1)]
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(lines))
    text = "word " * 200
    samples = [encode({"step": s, "prompt": f"p{i}", "completion": text}) for s in range(0, 100_001, 1000) for i in range(50)]
    (tmp_path / "samples.jsonl").write_bytes(b"".join(samples))
    write_report([tmp_path], tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size < 2_000_000
    data = read(tmp_path / "report.html").data
    curve = data["charts"][0]["curves"][0]
    assert len(curve["x"]) <= 3000 and curve["rows"] == 100_000
    assert (56_790, 50.0) in zip(curve["x"], curve["y"]) and (curve["x"][0], curve["x"][-1]) == (1, 100_000)
    steps = [group["step"] for group in data["samples"][0]]
    assert (steps[0], steps[-1]) == (0, 100_000)


# --- several runs ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sweep(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sweeps") / "2026-01-01"
    for number, rate in enumerate((0.1, 0.01, 0.001)):
        make_run(folder / str(number), steps=6 + 2 * number, settings=f"optimizer:\n  lr: {rate}\nseed: 3\n")
    return folder


def test_comparison(sweep, tmp_path):
    out = tmp_path / "out.html"
    assert main([str(sweep), "-o", str(out)]) == 0
    page = read(out)
    names = [run["name"] for run in page.data["runs"]]
    assert names == ["2026-01-01/0", "2026-01-01/1", "2026-01-01/2"]
    assert [len(c["x"]) for c in page.data["charts"][0]["curves"]] == [7, 9, 11]
    assert "optimizer.lr" in page.text and "seed" not in page.text.split("Different settings")[1].split("smoothing")[0]
    assert [attrs.get("class") for tag, attrs in page.tags if tag == "td"].count("num best") >= 2
    assert differing_keys(load_runs(find_runs([sweep]))) == [("optimizer.lr", [0.1, 0.01, 0.001])]


def test_one_folder_of_runs_gets_its_page_inside(sweep):
    assert main([str(sweep)]) == 0 and (sweep / "report.html").is_file()


def test_runs_given_twice_count_once_and_numbers_sort_as_numbers(tmp_path):
    for name in ("10", "9", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_bytes(b"")
    assert [p.name for p in find_runs([tmp_path, tmp_path / "9"])] == ["9", "10", "other"]


def test_a_folder_without_a_run_is_named_with_the_nearest(sweep, capsys):
    wrong = sweep.parent / "2026-01-0"
    assert main([str(wrong)]) == 1
    assert "is not a run folder" in capsys.readouterr().err
    (sweep.parent / "identity-lora").mkdir()
    (sweep.parent / "identity-lora" / "config.yaml").write_text("")
    with pytest.raises(UserError, match="did you mean .*identity-lora"):
        find_runs([sweep.parent / "identity-lor"])


def test_a_broken_config_is_named(tmp_path):
    (tmp_path / "config.yaml").write_text("a: [1")
    with pytest.raises(UserError, match=re.escape(str(tmp_path))):
        load_run(tmp_path)


def test_the_command(sweep, tmp_path):
    command = [sys.executable, "-m", "twinkle_research.report", str(sweep / "0"), "--out", str(tmp_path / "x.html")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, str(tmp_path / "x.html")) and (tmp_path / "x.html").is_file()


# --- parts -------------------------------------------------------------------------------------------------------------


def test_thin_keeps_ends_extremes_and_order():
    points = [(step, math.sin(step) if step % 97 else None) for step in range(10_000)]
    kept = thin(points, 500)
    assert len(kept) <= 500 and kept == sorted(kept, key=lambda p: p[0]) and kept[0] == points[0] and kept[-1] == points[-1]
    known = [y for _, y in points if y is not None]
    shown = [y for _, y in kept if y is not None]
    assert (min(shown), max(shown)) == (min(known), max(known))
    assert thin(points[:500], 500) == points[:500]


def test_summary():
    points = [(1, 3.0), (2, 1.0), (3, None), (4, 2.0)]
    low = summarize(points, "loss")
    assert (low.first, low.shown, low.best, low.best_step) == (3.0, 2.0, 1.0, 2)
    high = summarize(points, "eval/pass@8")
    assert (high.shown, high.best, high.best_step) == (2.0, 3.0, 1)
    assert summarize(points, "tokens_per_second").shown == 2.0 and summarize(points, "lr").best is None
    assert summarize([(1, None)], "loss") is None


def test_order_of_metrics():
    rows = [{"step": 1, "zeta": 1, "lr": 1, "eval/mean@4": 1, "loss": 1, "eval/loss": 1, "flag": True, "text": "x", "void": None}]
    assert metric_names(rows) == ["loss", "eval/loss", "eval/mean@4", "lr", "zeta"]
    assert series([{"step": 1}, {"step": 2, "loss": None}, {"step": 3, "loss": 1}], "loss") == [(2, None), (3, 1)]
    assert info("eval/mean@4").better == 1 and info("unknown").better == 0


def test_progress_axes_are_sums(tmp_path):
    run = load_run(make_run(tmp_path / "run", steps=5))
    axes = progress_axes(run)
    assert axes["steps"] == [0, 1, 2, 3, 4, 5]
    assert axes["tokens"] == [0, 101, 203, 306, 410, 515] and axes["seconds"] == [0, 0.5, 1.0, 1.5, 2.0, 2.5]
    assert len(progress_axes(run, limit=3)["steps"]) == 3


def test_flatten():
    assert flatten({"a": {"b": 1, "c": [1, 2]}, "d": None}) == {"a.b": 1, "a.c": [1, 2], "d": None}
