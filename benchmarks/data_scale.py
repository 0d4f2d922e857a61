"""Data at scale: rows a second, start and memory by the number of rows.

    python benchmarks/data_scale.py                          10,000, 100,000 and 1,000,000 rows: about four minutes on 2 cores
    python benchmarks/data_scale.py --rows 2000 20000 --out results.md

Short chat rows are encoded with the tokenizer of model=tiny, as `python train.py data=jsonl` does it. For each number of rows
three processes are measured: the first start (all rows are encoded), a later one (they are read from disk), and an epoch of
reading all of them in shuffled order. Memory is the peak of the process itself, beyond what it had before the rows came; time
starts when the libraries are loaded and the tokenizer is made, and `process` with the interpreter.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

SIZES = (10_000, 100_000, 1_000_000)
NUM_PROC = 2
BATCH = 32


def write_rows(path: Path, count: int) -> None:
    with path.open("w", encoding="utf-8") as file:
        for i in range(count):
            a, b = i % 97, i // 97 % 89
            question, answer = f"What is {a} + {b}?", f"{a} + {b} = {a + b}, row {i}."
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages}) + "\n")


def memory_mib() -> tuple[float, float]:
    """(resident memory now, its peak) of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def measure(path: Path, cache: Path, whole_epoch: bool) -> dict[str, float]:
    """In a process of its own: from a file to the first global batch, or through an epoch."""
    from twinkle_research.config import compose, to_object
    from twinkle_research.dataloader import build_loader
    from twinkle_research.dataset import build_datasets
    from twinkle_research.model.prepare import prepare
    from twinkle_research.template import build_template

    words = ["model=tiny", "data=jsonl", f"data.path={path}", f"data.num_proc={NUM_PROC}", f"data.cache_dir={cache}"]
    cfg = to_object(compose(words))
    template = build_template(cfg.data, prepare("tiny"))
    template.encode({"prompt": "a", "completion": "b"})
    before, begun = memory_mib()[0], time.perf_counter()
    rows, _ = build_datasets(cfg.data, template, seed=0)
    built = time.perf_counter() - begun
    loader = build_loader(rows, batch_size=BATCH, shuffle=True, seed=0, dp_rank=0, dp_size=1)
    batches = iter(loader)
    tokens = sum(feature["length"] for feature in next(batches))
    first = time.perf_counter() - begun
    if whole_epoch:
        tokens += sum(feature["length"] for batch in batches for feature in batch)
        assert tokens == rows.tokens
    end = time.perf_counter() - begun
    uptime = time.clock_gettime(time.CLOCK_BOOTTIME)
    started = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19]) / os.sysconf("SC_CLK_TCK")
    return {
        "rows": len(rows), "tokens": rows.tokens, "build": built, "first": first, "end": end, "whole": uptime - started,
        "memory": memory_mib()[1] - before, "before": before,
    }  # fmt: skip


def in_process(path: Path, cache: Path, whole_epoch: bool = False) -> dict[str, float]:
    command = [sys.executable, str(Path(__file__).resolve()), "--measure", str(path), str(cache), str(int(whole_epoch))]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def table(results: list[dict[str, dict[str, float]]]) -> str:
    lines = [
        "| rows | tokens | first encode | rows/s | memory | later start: first batch | process | memory | epoch read | memory |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        first, second, epoch = result["encode"], result["start"], result["epoch"]
        encoded, read = first["rows"] / first["build"], epoch["rows"] / (epoch["end"] - epoch["first"])
        lines.append(
            f"| {first['rows']:,} | {first['tokens'] / 1e6:.2f} M | {first['build']:.1f} s | {encoded:,.0f} "
            f"| {first['memory']:.1f} MiB | {second['first']:.2f} s | {second['whole']:.1f} s | {second['memory']:.1f} MiB "
            f"| {read:,.0f} rows/s | {epoch['memory']:.1f} MiB |"
        )
    return "\n".join(lines)


def growth(results: list[dict[str, dict[str, float]]], what: str) -> float:
    """Bytes a row: the slope of a line fitted to peak memory by rows."""
    rows = [result[what]["rows"] for result in results]
    return float(np.polyfit(rows, [result[what]["memory"] * 2**20 for result in results], 1)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=SIZES)
    parser.add_argument("--out", type=Path, help="also write the tables to this file")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        path, cache, whole_epoch = options.measure
        print(json.dumps(measure(Path(path), Path(cache), whole_epoch == "1")))
        return
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for count in options.rows:
            path, cache = Path(folder) / f"{count}.jsonl", Path(folder) / "encoded"
            write_rows(path, count)
            result = {"encode": in_process(path, cache), "start": in_process(path, cache)}
            results.append(result | {"epoch": in_process(path, cache, whole_epoch=True)})
            path.unlink()
            print(table(results[-1:]).splitlines()[-1], flush=True)
    text = table(results)
    if len(results) > 1:
        slopes = ", ".join(f"{growth(results, what):.1f} {name}" for what, name in (
            ("encode", "at the first encode"), ("start", "at a later start"), ("epoch", "over an epoch")))  # fmt: skip
        text += f"\n\nGrowth of the peak memory, fitted over these sizes, in bytes a row: {slopes}."
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    text = f"{text}\n\n{machine}; data.num_proc={NUM_PROC}; batches of {BATCH} rows; tokenizer of model=tiny.\n"
    print("\n" + text)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text("# Data at scale\n\n`python benchmarks/data_scale.py`\n\n" + text, encoding="utf-8")


if __name__ == "__main__":
    main()
