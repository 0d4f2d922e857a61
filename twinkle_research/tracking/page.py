"""The HTML of a report. Every text from a run goes through ``esc``; curves and answers are drawn by report.js."""

from __future__ import annotations

import json
from html import escape
from typing import Any

from twinkle_research import __version__
from twinkle_research.tracking.charts import info, metric_names, series, summarize
from twinkle_research.tracking.progress import format_duration
from twinkle_research.tracking.rundata import RunData, differing_keys

STATE_SIGNS = {"finished": "✓", "running": "●", "failed": "✕", "stopped": "❚❚", "killed": "✕", "waiting": "○"}

# Shown under the name of the run: label and the keys whose values are joined; what a run does not have is left out.
KEY_SETTINGS = (
    ("model", ("model.name", "model.path")),
    ("adapter", ("adapter.name", "adapter.r")),
    ("loss", ("loss.name",)),
    ("optimizer", ("optimizer.name", "optimizer.lr")),
    ("schedule", ("scheduler.name",)),
    ("batch", ("trainer.batch_size",)),
    ("data", ("data.path", "data.dataset_id")),
    ("dtype", ("model.dtype",)),
    ("backend", ("backend.name", "backend.sharding")),
    ("tensor · pipeline · context", ("backend.tensor_parallel", "backend.pipeline_parallel", "backend.context_parallel")),
    ("seed", ("seed",)),
)
CARDS = (
    "loss",
    "eval/loss",
    "eval/perplexity",
    "eval/accuracy",
    "reward/mean",
    "grad_norm",
    "lr",
    "tokens_per_second",
    "memory/peak_gib",
)


def esc(value: Any) -> str:
    return escape(str(value), quote=True)


def number(value: float | None) -> str:
    """Four significant digits; thousands are set apart."""
    if value is None:
        return "–"
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.2e}" if abs(value) < 1e-3 else f"{value:.4g}"


def setting(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.12g}"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict | bool) else str(value)


def lookup(config: dict[str, Any], key: str) -> Any:
    node: Any = config
    for part in key.split("."):
        node = node.get(part) if isinstance(node, dict) else None
    return node


# --- one run --------------------------------------------------------------------------------------------------------


def state_badge(state: str) -> str:
    sign = STATE_SIGNS.get(state, "?")
    return f'<span class="state state-{esc(state)}"><span aria-hidden="true">{sign}</span> {esc(state)}</span>'


def header(run: RunData) -> str:
    facts = [f"step {run.steps:,}", f"{format_duration(run.seconds)} of training"]
    if run.tokens:
        facts.append(f"{run.tokens:,} trained tokens")
    if run.status.get("objective") is not None:
        facts.append(f"objective {number(run.status['objective'])}")
    if run.status.get("time"):
        facts.append(f"updated {run.status['time']}")
    chips = []
    for label, keys in KEY_SETTINGS:
        values = [setting(v) for v in (lookup(run.config, key) for key in keys) if v is not None]
        if values:
            chips.append(f"<div><dt>{esc(label)}</dt><dd>{esc(' · '.join(values))}</dd></div>")
    return (
        f'<header><h1>{esc(run.name)} {state_badge(run.state)}</h1><p class="facts">{esc(" · ".join(facts))}</p>'
        f'<dl class="chips">{"".join(chips)}</dl>{failure(run)}</header>'
    )


def failure(run: RunData) -> str:
    message, traceback = run.status.get("message"), run.status.get("traceback")
    if run.state not in ("failed", "stopped") or not message:
        return ""
    details = f"<details><summary>traceback</summary><pre>{esc(traceback)}</pre></details>" if traceback else ""
    return f'<div class="failure"><pre>{esc(message)}</pre>{details}</div>'


def cards(run: RunData) -> str:
    found = []
    for metric in CARDS:
        what = info(metric)
        summary = summarize(series(run.metrics, metric) or series(run.timing, metric), metric)
        if summary is None:
            continue
        notes = ["mean"] if what.mean else []
        if summary.first != summary.shown and not what.mean:
            notes.append(f"first {number(summary.first)}")
        if summary.best is not None and (summary.best != summary.shown or notes):
            notes.append(f"best {number(summary.best)} at step {summary.best_step:,}")
        found.append(
            f'<div class="card" data-metric="{esc(metric)}"><h3 title="{esc(what.hint)}">{esc(metric)}</h3>'
            f'<p class="value">{number(summary.shown)}</p><p class="small">{esc(" · ".join(notes))}</p></div>'
        )
    return f'<section class="cards" aria-label="last values">{"".join(found)}</section>' if found else ""


def config_section(runs: list[RunData]) -> str:
    titles = ["config.yaml"] if len(runs) == 1 else [run.name for run in runs]
    blocks = [
        f"<details><summary>{esc(title)}</summary><pre>{esc(run.config_text)}</pre></details>"
        for title, run in zip(titles, runs)
        if run.config_text
    ]
    return f"<section><h2>Configuration</h2>{''.join(blocks)}</section>" if blocks else ""


# --- several runs -----------------------------------------------------------------------------------------------------


def swatch(index: int) -> str:
    return f'<span class="swatch" data-run="{index}" aria-hidden="true"></span>'


def comparison_header(runs: list[RunData]) -> str:
    return f'<header><h1>{len(runs)} runs compared</h1><p class="facts">{esc(", ".join(run.name for run in runs))}</p></header>'


def final_table(runs: list[RunData]) -> str:
    """Last value (or mean) of each metric in each run; the best of a column stands out."""
    columns = []
    for rows_of in (lambda run: run.metrics, lambda run: run.timing):
        names = metric_names([row for run in runs for row in rows_of(run)])
        columns += [(n, [summarize(series(rows_of(run), n), n) for run in runs]) for n in names if "time/" not in n]
    head = "".join(
        f'<th scope="col" class="num" title="{esc(info(name).hint)}">{esc(name)}{", mean" if info(name).mean else ""}</th>'
        for name, _ in columns
    )
    body = []
    for index, run in enumerate(runs):
        cells = "".join(final_cell(name, summaries, index) for name, summaries in columns)
        body.append(
            f'<tr><th scope="row">{swatch(index)}{esc(run.name)}</th><td>{state_badge(run.state)}</td>'
            f'<td class="num">{run.steps:,}</td><td class="num">{format_duration(run.seconds)}</td>{cells}</tr>'
        )
    return (
        '<section><h2>Final values</h2><div class="wide"><table id="final"><thead><tr><th scope="col">run</th>'
        '<th scope="col">state</th><th scope="col" class="num">steps</th><th scope="col" class="num">time</th>'
        f"{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div></section>"
    )


def final_cell(metric: str, summaries: list[Any], index: int) -> str:
    mine, better = summaries[index], info(metric).better
    if mine is None:
        return '<td class="num">–</td>'
    values = [s.shown for s in summaries if s is not None]
    leads = better and len(set(values)) > 1 and better * mine.shown == max(better * value for value in values)
    text = number(mine.shown)
    return f'<td class="num best" title="best of the runs">{text}</td>' if leads else f'<td class="num">{text}</td>'


def differences(runs: list[RunData]) -> str:
    rows = differing_keys(runs)
    if not rows:
        return "<section><h2>Different settings</h2><p>None: the configurations are equal.</p></section>"
    head = "".join(f'<th scope="col">{swatch(i)}{esc(run.name)}</th>' for i, run in enumerate(runs))
    body = "".join(
        f'<tr><th scope="row"><code>{esc(key)}</code></th>{"".join(f"<td>{esc(setting(v))}</td>" for v in values)}</tr>'
        for key, values in rows
    )
    return (
        '<section><h2>Different settings</h2><div class="wide"><table id="differences"><thead><tr><th scope="col">key</th>'
        f"{head}</tr></thead><tbody>{body}</tbody></table></div></section>"
    )


# --- the page -----------------------------------------------------------------------------------------------------------

# Nothing is loaded from anywhere, and what a model wrote could load nothing even if it got into the page.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"

CONTROLS = """
<div class="controls" role="group" aria-label="chart settings">
  <label>smoothing <input id="smoothing" type="range" min="0" max="0.99" step="0.01" value="0">
  <output id="smoothing-value">off</output></label>
  <label>x axis <select id="axis"><option value="steps">step</option><option value="tokens">trained tokens</option>
  <option value="seconds">training time</option></select></label>
  <label><input id="log-all" type="checkbox"> log scale</label>
  <button id="reset-zoom" type="button" hidden>reset zoom</button>
  <span id="legend"></span>
</div>"""

SAMPLES = """
<section id="samples"><h2>Answers</h2>
<div class="controls">
  <label>left <select id="left"></select></label>
  <label>right <select id="right"></select></label>
  <label>find <input id="find" type="search" placeholder="text in prompt or answer"></label>
  <span class="pager"><button id="previous" type="button">previous</button> <output id="page"></output>
  <button id="next" type="button">next</button></span>
</div>
<div id="pairs"></div></section>"""


def chart_section(charts: list[dict[str, Any]], group: str, title: str) -> str:
    figures = "".join(
        f'<figure class="chart" data-chart="{index}"><figcaption><span class="metric">{esc(chart["metric"])}</span>'
        f'<span class="hint">{esc(chart["hint"])}</span><button type="button" class="log" aria-pressed="false">log</button>'
        f"</figcaption></figure>"
        for index, chart in enumerate(charts)
        if chart["group"] == group
    )
    return f'<h2>{esc(title)}</h2><div class="grid">{figures}</div>' if figures else ""


def body(runs: list[RunData], charts: list[dict[str, Any]], samples: bool, sweep: str = "") -> str:
    """The page's content for one run or several. ``sweep``: a section on the sweep that they are the jobs of."""
    parts = [header(runs[0]), sweep, cards(runs[0])]
    if len(runs) > 1:
        parts = [comparison_header(runs), sweep, final_table(runs), differences(runs)]
    if charts:
        parts.append(f'<section id="charts">{CONTROLS}{chart_section(charts, "learning", "Learning")}</section>')
    else:
        parts.append("<p>No step has been recorded yet.</p>")
    if samples:
        parts.append(SAMPLES)
    parts.append(f"<section>{chart_section(charts, 'speed', 'Speed and memory')}</section>")
    parts += [config_section(runs), f"<footer>twinkle_research {esc(__version__)}</footer>"]
    return "\n".join(parts)


def document(title: str, body: str, data: str, style: str, script: str) -> str:
    """The whole file. ``data`` is safe inside a script element."""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{esc(title)}</title><style>
{style}</style></head><body><button id="theme" type="button" title="light, dark or as the system">theme</button><main>
{body}
</main><noscript><p>The curves and answers of this page are drawn by its own script, which is turned off here.</p></noscript>
<script type="application/json" id="data">{data}</script><script>
{script}</script></body></html>
"""
