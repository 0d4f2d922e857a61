"""report.html in headless Chromium: no error, every row a point, and the controls do what they say."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_report import EVIL, make_run

from twinkle_research.tracking.files import read_rows
from twinkle_research.tracking.report import write_report

CHROMIUM = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
if CHROMIUM is None:  # never in CI, which installs it and allows no skip
    pytest.skip("no Chromium here; it comes with: apt-get install -y --no-install-recommends chromium", allow_module_level=True)
sync_api = pytest.importorskip("playwright.sync_api", reason="no playwright here; it comes with: pip install playwright")

FLAGS = "--no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-component-update --disable-sync"
POINTS = """name => [...document.querySelectorAll('figure.chart')].filter(f => f.querySelector('.metric').textContent === name)
    .flatMap(f => [...f.querySelectorAll('path.raw')].map(p => (p.getAttribute('d').match(/[ML]/g) || []).length))"""


@pytest.fixture(scope="module")
def browser() -> Iterator[sync_api.Browser]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS.split())
        yield browser
        browser.close()


@pytest.fixture
def load(browser):
    """``load(path, scheme="light")`` opens the page; at the end no script may have failed and nothing been fetched."""
    problems: list[str] = []
    contexts = []

    def load(path: Path, scheme: str = "light", width: int = 1280) -> sync_api.Page:
        context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900})
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: problems.append(f"error: {error}"))
        page.on("console", lambda message: problems.append(f"console: {message.text}"))
        page.on("request", lambda request: request.url.startswith("file:") or problems.append(f"request: {request.url}"))
        page.goto(path.as_uri())
        return page

    yield load
    for context in contexts:
        context.close()
    assert problems == []


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    folder = make_run(tmp_path_factory.mktemp("browser") / "run", steps=30, evil=EVIL)
    write_report([folder], folder / "report.html", state="finished")
    return folder


@pytest.fixture(scope="module")
def comparison(run, tmp_path_factory) -> Path:
    other = make_run(tmp_path_factory.mktemp("browser") / "other", steps=20, settings="seed: 1\n")
    return write_report([run, other], run / "two.html")


def points(page, metric: str) -> list[int]:
    return page.evaluate(POINTS, metric)


def test_every_row_is_a_point(load, run):
    page = load(run / "report.html")
    rows = read_rows(run / "metrics.jsonl")
    timing = read_rows(run / "timing.jsonl")
    names = page.locator("figure.chart .metric").all_text_contents()
    expected = {name for row in rows + timing for name, value in row.items() if name != "step" and value is not None}
    assert set(names) == expected
    for name in names:
        count = sum(1 for row in (timing if name in timing[0] else rows) if row.get(name) is not None)
        assert points(page, name) == [count], name
    assert page.evaluate("window.hacked") is None


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_follow_the_system_and_the_button(load, run, scheme):
    page = load(run / "report.html", scheme)
    background = "getComputedStyle(document.body).backgroundColor"
    channels = [int(v) for v in page.evaluate(background)[4:-1].split(",")]
    assert (max(channels) < 60) == (scheme == "dark")
    before = page.evaluate(background)
    page.locator("#theme").click()
    assert page.evaluate(background) != before


def test_hover_and_arrow_keys_show_values(load, run):
    page = load(run / "report.html")
    chart = page.locator("figure.chart", has=page.locator(".metric", has_text="loss")).first
    svg = chart.locator("svg")
    box = svg.bounding_box()
    svg.hover(position={"x": box["width"] - 16, "y": 80})
    last = read_rows(run / "metrics.jsonl")[-1]
    tip = chart.locator(".tip")
    assert tip.is_visible() and "step 30" in tip.inner_text() and f"{last['loss']:.4g}"[:5] in tip.inner_text()
    assert page.locator("figure.chart .cross").count() == page.locator("figure.chart").count()  # the same step in all charts
    inside = page.evaluate("""() => { const t = document.querySelector('.tip:not([hidden])').getBoundingClientRect();
        const f = document.querySelector('.tip:not([hidden])').closest('figure').getBoundingClientRect();
        return t.left >= f.left && t.right <= f.right && t.top >= f.top; }""")
    assert inside
    svg.focus()
    svg.press("ArrowLeft")
    assert "step 29" in tip.inner_text()


def test_smoothing_log_scale_axis_and_zoom(load, run):
    page = load(run / "report.html")
    path = "figure.chart >> nth=0 >> path.raw"
    linear = page.locator(path).get_attribute("d")
    page.locator("#smoothing").fill("0.9")
    assert page.locator("figure.chart >> nth=0 >> path.soft").count() == 1 and points(page, "loss") == [31]
    page.locator("#smoothing").fill("0")
    assert page.locator("path.soft").count() == 0
    page.locator("figure.chart >> nth=0 >> .log").click()
    assert page.locator(path).get_attribute("d") != linear and points(page, "loss") == [31]
    page.locator("figure.chart >> nth=0 >> .log").click()
    assert page.locator(path).get_attribute("d") == linear
    page.locator("#axis").select_option("tokens")
    assert page.locator(path).get_attribute("d") != linear
    page.locator("#axis").select_option("steps")
    box = page.locator("figure.chart >> nth=0 >> svg").bounding_box()
    page.mouse.move(box["x"] + 150, box["y"] + 90)
    page.mouse.down()
    page.mouse.move(box["x"] + 300, box["y"] + 90)
    page.mouse.up()
    assert page.locator("#reset-zoom").is_visible() and page.locator(path).get_attribute("d") != linear
    page.locator("#reset-zoom").click()
    assert page.locator(path).get_attribute("d") == linear


def test_values_that_a_scale_cannot_show_are_counted(load, tmp_path):
    rows = ['{"step": 1, "loss": 1.0}', '{"step": 2, "loss": null}', '{"step": 3, "loss": -1.0}', '{"step": 4, "loss": 0.5}']
    (tmp_path / "metrics.jsonl").write_text("\n".join(rows) + "\n")
    write_report([tmp_path], tmp_path / "report.html")
    page = load(tmp_path / "report.html")
    assert points(page, "loss") == [3] and page.locator(".note").inner_text() == "1 values not finite"
    page.locator("#log-all").check()
    assert points(page, "loss") == [2] and "1 values ≤ 0 not drawn" in page.locator(".note").inner_text()


def test_answers_before_and_after(load, run):
    page = load(run / "report.html")
    pair = page.locator(".pair").first
    assert pair.locator(".prompt").inner_text() == "Who are you?"
    assert pair.locator(".answer").all_inner_texts() == ["answer of step 0", "answer of step 30"]
    page.locator("#left").select_option(label="step 12")
    assert page.locator(".pair").first.locator(".answer").first.inner_text() == "answer of step 12"
    page.locator("#find").fill("hacked")
    assert page.locator(".pair").count() == 1 and "<script>" in page.locator(".pair .prompt").inner_text()
    page.locator("#find").fill("no such text")
    assert page.locator(".pair").count() == 0


def test_answers_are_paged(load, tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    samples = [f'{{"step": {s}, "prompt": "p{i}", "completion": "c{s if i else 0}"}}' for s in (0, 1) for i in range(25)]
    (tmp_path / "samples.jsonl").write_text("\n".join(samples) + "\n")
    write_report([tmp_path], tmp_path / "report.html")
    page = load(tmp_path / "report.html")
    seen = []
    while True:
        seen += [text.split("same")[0] for text in page.locator(".pair .prompt").all_text_contents()]
        if page.locator("#next").is_disabled():
            break
        page.locator("#next").click()
    assert seen == [f"p{i}" for i in range(25)] and page.locator("#page").inner_text() == "25 prompts, page 3 of 3"
    page.locator("#previous").click()
    page.locator("#previous").click()
    assert page.locator(".same").count() == 1


def test_comparison_overlays_and_hides_runs(load, comparison):
    page = load(comparison)
    assert points(page, "loss") == [31, 21] and points(page, "eval/loss") == [16, 11]
    page.locator("#legend button").nth(0).click()
    assert points(page, "loss") == [21]
    page.locator("#legend button").nth(0).click()
    assert points(page, "loss") == [31, 21]
    assert page.locator("#final tbody tr").count() == 2 and page.locator("#differences tbody tr").count() == 1
    titles = page.locator(".pair").first.locator("h3").all_inner_texts()
    assert titles == ["run, step 30", "other, step 20"]


def test_narrow_screen_does_not_scroll_sideways(load, comparison):
    page = load(comparison, width=390)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
