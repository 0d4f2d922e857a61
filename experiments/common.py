"""What the studies share: they drive train.py like a user, read what it records, and write their result beside themselves.

A study is a folder with README.md, result.json and curves.svg. All numbers of the tables and the plot come from result.json;
the tables stand in README.md between the lines ``<!-- result: <name> -->`` and ``<!-- end -->``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
QUIET = ("tracking.progress=none", "tracking.tensorboard=false", "tracking.report=false", "tracking.wandb.mode=disabled")
DONE = "study.json"  # in a run folder: the settings that it was finished with
# Okabe & Ito's colours, which also the colour-blind can tell apart.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


@dataclass(frozen=True)
class Study:
    """``measure(work, **scale)`` runs what is missing below ``work`` and returns what goes into result.json: plain numbers.
    ``tables(result)`` gives the README's tables by name, ``plot(result)`` the figure. ``full`` and ``short`` are scales: that of
    the committed result, and one that shows in seconds that everything works."""

    folder: Path
    measure: Callable[..., dict[str, Any]]
    tables: Callable[[dict[str, Any]], dict[str, str]]
    plot: Callable[[dict[str, Any]], Figure]
    full: dict[str, Any]
    short: dict[str, Any]

    def main(self, argv: Sequence[str] | None = None) -> None:
        name = self.folder.name
        parser = argparse.ArgumentParser(prog=f"python -m experiments.{name}", description=f"See experiments/{name}/README.md.")
        parser.add_argument("--short", action="store_true", help="a rehearsal of a minute; writes to <work>/result, not here")
        parser.add_argument("--seeds", type=int, nargs="+", help=f"instead of {self.full['seeds']}")
        parser.add_argument("--work", type=Path, help=f"where the runs are kept (runs/{name}; with --short runs/{name}_short)")
        parser.add_argument("--out", type=Path, help="where README.md, result.json and curves.svg are written")
        parser.add_argument("--from-result", action="store_true", help="run nothing: tables and plot of the result.json in --out")
        args = parser.parse_args(argv)

        work = (args.work or ROOT / "runs" / (f"{name}_short" if args.short else name)).resolve()
        out = args.out or (work / "result" if args.short else self.folder)
        if args.from_result:
            result = json.loads((out / "result.json").read_text())
        else:
            scale = dict(self.short if args.short else self.full)
            result = rounded(self.measure(work, **scale | ({"seeds": args.seeds} if args.seeds else {})))
        self.write(out, result)

    def write(self, out: Path, result: dict[str, Any]) -> None:
        out.mkdir(parents=True, exist_ok=True)
        if not (out / "README.md").exists():
            shutil.copy(self.folder / "README.md", out)
        (out / "result.json").write_text(one_row_a_line(result))
        save_svg(self.plot(result), out / "curves.svg", salt=self.folder.name)
        tables = self.tables(result)
        readme = (out / "README.md").read_text(encoding="utf-8")
        (out / "README.md").write_text(with_tables(readme, tables), encoding="utf-8")
        print(*(f"{title}\n{text}\n" for title, text in tables.items()), f"written to {out}", sep="\n")


# --- runs -----------------------------------------------------------------------------------------------------------


def run_all(jobs: dict[Path, Iterable[str]]) -> None:
    """``train.py`` with its settings in each folder, in turn. What is finished is left as it is, what was stopped goes on."""
    for number, (folder, settings) in enumerate(jobs.items(), start=1):
        words, started = list(settings), time.monotonic()
        if _finished_with(folder) == words:
            continue
        print(f"[{number}/{len(jobs)}] {folder.name}", end=" ", flush=True)
        _train_py(*words, f"run_dir={folder}")
        (folder / DONE).write_text(json.dumps(words))
        print(f"{time.monotonic() - started:.0f} s", flush=True)


def _finished_with(folder: Path) -> list[str] | None:
    done = folder / DONE
    return json.loads(done.read_text()) if done.exists() else None


def _train_py(*words: str) -> None:
    command = [sys.executable, "train.py", *QUIET, *words]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            output, _ = process.communicate()
        except KeyboardInterrupt:
            with contextlib.suppress(KeyboardInterrupt):
                process.wait()  # it got the signal too, and saves what it has
            sys.exit("stopped; the same command goes on")
    if process.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{output}")


def curve(run: Path, name: str) -> dict[int, float]:
    """step -> value of one metric, for the steps that have it."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row[name] for row in rows if name in row}


def mean_of(run: Path, name: str) -> float | None:
    """Of one metric over all steps; None where no step has it."""
    values = curve(run, name).values()
    return statistics.fmean(values) if values else None


# --- numbers --------------------------------------------------------------------------------------------------------


def rounded(value: Any, digits: int = 6) -> Any:
    """All floats to so many significant digits."""
    if isinstance(value, dict):
        return {key: rounded(item, digits) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item, digits) for item in value]
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


def mean_sd(values: Sequence[float], digits: int = 2, signed: bool = False) -> str:
    """``0.84 ± 0.01``: mean and sample standard deviation; of a single value only itself."""
    sign = "+" if signed else ""
    mean = f"{statistics.fmean(values):{sign}.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.{digits}f}"


def band(curves: Sequence[Sequence[float]]) -> tuple[list[float], list[float], list[float]]:
    """Mean, mean - sd and mean + sd of several curves at each of their points."""
    points = list(zip(*curves, strict=True))
    means = [statistics.fmean(p) for p in points]
    sds = [statistics.stdev(p) if len(p) > 1 else 0.0 for p in points]
    return means, [m - s for m, s in zip(means, sds, strict=True)], [m + s for m, s in zip(means, sds, strict=True)]


# --- files ----------------------------------------------------------------------------------------------------------


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def with_tables(readme: str, tables: dict[str, str]) -> str:
    """The text with each table in its place. Raises ValueError where places and tables are not the same."""
    pattern = re.compile(r"(<!-- result: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
    places = [match[2] for match in pattern.finditer(readme)]
    if sorted(places) != sorted(tables):
        raise ValueError(f"README.md has places for {places}, the result has {list(tables)}")
    return pattern.sub(lambda match: f"{match[1]}\n{tables[match[2]]}\n\n{match[3]}", readme)


def one_row_a_line(result: dict[str, Any]) -> str:
    """JSON in which each item of a list of objects has a line of its own."""
    entries = []
    for key, value in result.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            lines = ",\n".join(f"  {json.dumps(item)}" for item in value)
            entries.append(f' "{key}": [\n{lines}\n ]')
        else:
            entries.append(f' "{key}": {json.dumps(value)}')
    return "{\n" + ",\n".join(entries) + "\n}\n"


def new_figure(columns: int, width: float, height: float, **options: Any) -> tuple[Figure, Any]:
    """A figure with a row of axes, light grid, no box."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, columns, figsize=(width, height), layout="constrained", **options)
    for axis in [axes] if columns == 1 else axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25, linewidth=0.6)
    return figure, axes


def save_svg(figure: Figure, path: Path, salt: str) -> None:
    """The same picture is the same file."""
    import matplotlib.pyplot as plt

    with plt.rc_context({"svg.hashsalt": salt}):
        figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
