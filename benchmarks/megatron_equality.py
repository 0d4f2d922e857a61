"""Twenty optimizer steps on Megatron-Core against those of transformers: the largest distances for each layout, model and task.

    python benchmarks/megatron_equality.py                       what fits into ten CPU minutes, as results/megatron_equality.md
    python benchmarks/megatron_equality.py --minutes 60          more of it; the table says how much
    python benchmarks/megatron_equality.py --processes 4 --layouts TP2-PP2 --out table.md

Models, rows, tasks and layouts are those of tests/model/megatron/equality_cases.py. A combination of layout, model and task is
trained with one adapter, packing and recomputation; these take turns from one combination to the next.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import resource
import sys
import tempfile
from dataclasses import asdict
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "model"), str(ROOT / "tests" / "model" / "megatron")]

from equality_cases import ADAPTERS, FAMILIES, LAYOUTS, PACKING, RECOMPUTE, TASKS, Case, is_possible, make_folder  # noqa: E402
from ranks import launch  # noqa: E402

SHOWN = {"loss": "loss", "grad_norm": "norm", "weights": "weights"}
BATCH = 16  # cases of one launch

Gaps = dict[str, float]


def all_cases(size: int) -> list[Case]:
    """One for each layout, model and task. In a shuffled order, so that a part of it is of all kinds."""
    ways = list(product(ADAPTERS, PACKING, RECOMPUTE))
    random.Random(0).shuffle(ways)
    found, turn = [], 0
    for layout, family, tied, task in product(LAYOUTS[size], FAMILIES, (True, False), TASKS):
        possible = [way for way in ways if is_possible(layout, family, tied, task, *way)]
        if possible:
            found.append(Case(layout, family, tied, task, *possible[turn % len(possible)]))
            turn += 1
    random.Random(0).shuffle(found)
    return found


def cpu_minutes() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (usage.ru_utime + usage.ru_stime) / 60


def run(cases: list[Case], size: int, minutes: float, folder: Path) -> dict[Case, Gaps]:
    found: dict[Case, Gaps] = {}
    end = cpu_minutes() + minutes
    for first in range(0, len(cases), BATCH):
        if cpu_minutes() > end:
            break
        batch = cases[first : first + BATCH]
        for model in {case.model for case in batch}:
            if not (folder / model).exists():
                make_folder(model, folder / model)
        (folder / "cases.json").write_text(json.dumps([asdict(case) for case in batch]))
        arguments = (folder, folder / "expected", folder, folder / "cases.json")
        launch("equality_worker", *arguments, processes=size, seconds=1800)
        parts = [json.loads((folder / f"{size}-{rank}.json").read_text()) for rank in range(size)]
        for case in batch:
            found[case] = {name: max(part[str(case)][name] for part in parts) for name in parts[0][str(case)]}
        print(
            f"{size} processes: {len(found)} of {len(cases)} cases, {cpu_minutes():.1f} CPU minutes", file=sys.stderr, flush=True
        )
    return found


def worst(found: list[Gaps]) -> str:
    return " ".join(f"{max(gaps[name] for gaps in found):.0e}" for name in SHOWN) if found else "-"


def table(found: dict[Case, Gaps]) -> list[str]:
    """A line for each layout and model, a column for each task."""
    lines = [f"| layout | model | {' | '.join(TASKS)} | all |", "|---" * (len(TASKS) + 3) + "|"]
    for layout, model in sorted({(case.layout, case.model) for case in found}):
        own = {case.task: gaps for case, gaps in found.items() if (case.layout, case.model) == (layout, model)}
        cells = [worst([own[task]] if task in own else []) for task in TASKS]
        lines.append(f"| {layout} | {model} | {' | '.join(cells)} | {worst(list(own.values()))} |")
    return lines


def report(found: dict[Case, Gaps], possible: int) -> str:
    import megatron.core
    import torch
    import transformers

    versions = f"megatron-core {megatron.core.__version__}, transformers {transformers.__version__}, torch {torch.__version__}"
    every = list(found.values())
    largest = ", ".join(f"{name} {max(gaps[name] for gaps in every):.1e}" for name in every[0])
    ways = {name: [] for name in (*ADAPTERS, *PACKING, *RECOMPUTE)}
    for case, gaps in found.items():
        for name in (case.adapter, case.packing, case.recompute):
            ways[name].append(gaps)
    return "\n".join([
        "# Megatron-Core against transformers", "",
        f"Made by `python benchmarks/megatron_equality.py`; {versions}, {platform.machine()}, CPU, float32.", "",
        "Twenty optimizer steps of tiny models (2 layers, `deep`: 4; size 32, vocabulary 251), AdamW, weight decay, clipping, "
        "windows of two calls, a short one at the end of an epoch, uneven rows, at times a share without a row. `sft`: "
        "cross-entropy; `grpo`: recorded rollouts with KL to a reference, entropy bonus and temperatures; `dpo`: pairs with a "
        "reference; `ppo`: with a critic.", "",
        f"Cells: the largest distance over all steps and processes of the {', the '.join(SHOWN.values())} (norm: of the "
        f"gradient, relative; weights: after the last step). {len(found)} of {possible} combinations were run, each with an "
        "adapter, packing and recomputation in turn.", "",
        f"Largest of all: {largest}.", "",
        *table(found), "",
        "The same by how they were trained:", "",
        "| | all |", "|---|---|", *(f"| {name} | {worst(own)} |" for name, own in ways.items()), "",
    ])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="CPU minutes, about; what does not fit is left out")
    parser.add_argument("--processes", type=int, nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--layouts", nargs="+", help="only these")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "megatron_equality.md")
    arguments = parser.parse_args()
    found: dict[Case, Gaps] = {}
    possible = 0
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "expected").mkdir()
        for size in arguments.processes:
            cases = [case for case in all_cases(size) if not arguments.layouts or case.layout in arguments.layouts]
            possible += len(cases)
            found |= run(cases, size, arguments.minutes / len(arguments.processes), Path(folder))
    text = report(found, possible)
    arguments.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
