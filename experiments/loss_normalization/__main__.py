"""Token or sequence normalisation when short and long answers share a batch. See README.md beside this file.

python -m experiments.loss_normalization
"""

from __future__ import annotations

import json
import random
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.common import COLORS, Study, curve, new_figure, run_all, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TASKS = ("short", "long")
MICRO_BATCH = 4  # rows; that of the runs that others are compared with
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def make_row(task: str, index: int) -> dict:
    """short: the next letter of the alphabet. long: count up through about thirty numbers. Each row has its own generator."""
    draw = random.Random(f"{task}-{index}")
    if task == "short":
        letter = draw.randrange(len(LETTERS) - 1)
        question, answer = f"Letter after {LETTERS[letter]}", LETTERS[letter + 1]
    else:
        first = draw.randrange(1, 60)
        last = first + draw.randrange(25, 35)
        question, answer = f"Count from {first} to {last}", " ".join(map(str, range(first, last + 1)))
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def write_data(folder: Path, train_rows: int, held_out_rows: int) -> None:
    """train.jsonl: both tasks in turn, as many rows of each. <task>.jsonl: held-out rows of one task."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {"train": [make_row(TASKS[i % 2], i) for i in range(train_rows)]}
    files |= {task: [make_row(task, 10**6 + i) for i in range(held_out_rows)] for task in TASKS}
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def measure(
    work: Path, normalizations: list[str], seeds: list[int], steps: int, cut_steps: int, micro_batches: list[int]
) -> dict[str, Any]:
    """``cut_steps``: length of the runs that are cut otherwise. The schedule is constant, so a short run must follow the
    beginning of a long one."""
    data = work / "data"
    write_data(data, train_rows=16 * steps, held_out_rows=64)
    shared = ("model=tiny", "adapter=none", "data=jsonl")
    long_runs = [(normalization, seed, MICRO_BATCH) for normalization in normalizations for seed in seeds]
    short_runs = [(normalization, seeds[0], size) for normalization in normalizations for size in micro_batches]
    folders = {run: work / "{}-seed{}-mb{}".format(*run) for run in long_runs + short_runs}

    def training(normalization: str, seed: int, micro_batch: int) -> list[str]:
        return [
            *(*shared, f"data.path={data / 'train.jsonl'}", f"data.eval_path={data / 'short.jsonl'}"),
            *(f"trainer.eval_every={max(1, steps // 10)}", f"loss.normalization={normalization}"),
            *(f"trainer.max_steps={steps if micro_batch == MICRO_BATCH else cut_steps}", "trainer.batch_size=16"),
            *(f"trainer.micro_batch_size={micro_batch}", "optimizer.lr=2e-3", f"seed={seed}"),
        ]

    run_all({folders[run]: training(*run) for run in folders})
    # The other task's held-out loss: an evaluation of the finished run.
    words = [*shared, f"data.path={data / 'long.jsonl'}", f"data.eval_path={data / 'long.jsonl'}", "eval_only=true"]
    judged = {run: work / f"{folders[run].name}-long" for run in long_runs}
    run_all({judged[run]: [*words, f"resume={folders[run]}"] for run in long_runs})
    return {
        "steps": steps,
        "normalizations": normalizations,
        "seeds": seeds,
        "held_out": [held_out(n, [(folders[run], judged[run]) for run in long_runs if run[0] == n]) for n in normalizations],
        "curves": [learning(run, folders[run]) for run in long_runs],
        "cut": [gap(run, folders[run], folders[(*run[:2], MICRO_BATCH)]) for run in short_runs],
    }


def held_out(normalization: str, runs: list[tuple[Path, Path]]) -> dict[str, Any]:
    """The losses after training, from the least to the largest. ``runs``: the run and its evaluation on long answers."""
    losses = {
        "short": [list(curve(run, "eval/loss").values())[-1] for run, _ in runs],
        "long": [json.loads((judged / "evaluation.json").read_text())["eval/loss"] for _, judged in runs],
    }
    return {"normalization": normalization} | {task: sorted(values) for task, values in losses.items()}


def learning(run: tuple[str, int, int], folder: Path) -> dict[str, Any]:
    losses = curve(folder, "eval/loss")
    return {"normalization": run[0], "seed": run[1], "eval_steps": list(losses), "short": list(losses.values())}


def gap(run: tuple[str, int, int], folder: Path, whole: Path) -> dict[str, Any]:
    """How far the training loss is from that of the run which is cut into micro-batches of MICRO_BATCH rows."""
    reference = curve(whole, "loss")
    gaps = [abs(loss - reference[step]) / reference[step] for step, loss in curve(folder, "loss").items()]
    return {"normalization": run[0], "micro_batch_size": run[2], "first_10_steps": max(gaps[:10]), "last_step": gaps[-1]}


# --- tables and plot --------------------------------------------------------------------------------------------------


def tables(result: dict[str, Any]) -> dict[str, str]:
    def cell(losses: list[float]) -> str:
        return f"{statistics.mean(losses):.2f} ({min(losses):.2f} to {max(losses):.2f})"

    losses = [[f"`{row['normalization']}`", *(cell(row[task]) for task in TASKS)] for row in result["held_out"]]
    cut = [
        [f"`{c['normalization']}`", str(c["micro_batch_size"]), f"{c['first_10_steps']:.0e}", f"{c['last_step']:.0e}"]
        for c in result["cut"]
    ]
    return {
        "held_out": table(["normalisation", "short answers", "long answers"], losses),
        "cut": table(["normalisation", "micro-batch size", "largest of the first 10 steps", "last step"], cut),
    }


def plot(result: dict[str, Any]) -> Figure:
    figure, axes = new_figure(1, 6, 3.4)
    for color, normalization in zip(COLORS, result["normalizations"], strict=False):
        runs = [run for run in result["curves"] if run["normalization"] == normalization]
        for run in runs:
            label = normalization if run is runs[0] else None
            axes.plot(run["eval_steps"], run["short"], color=color, alpha=0.8, linewidth=1.2, label=label)
    axes.set(xlabel="optimizer step", ylabel="held-out loss of short answers,\nnats per token")
    axes.legend(title="one line a seed", frameon=False)
    return figure


STUDY = Study(
    folder=Path(__file__).resolve().parent,
    measure=measure,
    tables=tables,
    plot=plot,
    full={"normalizations": ["token", "sequence"], "seeds": [0, 1, 2], "steps": 200, "cut_steps": 50, "micro_batches": [1, 16]},
    short={"normalizations": ["sequence"], "seeds": [0], "steps": 2, "cut_steps": 2, "micro_batches": [16]},
)

if __name__ == "__main__":
    STUDY.main()
