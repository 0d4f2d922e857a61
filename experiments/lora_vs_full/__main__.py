"""LoRA's rank and learning rate against full fine-tuning. See README.md beside this file.

python -m experiments.lora_vs_full
"""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.common import COLORS, Study, curve, mean_sd, new_figure, run_all, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# model=tiny_sums has learned sums halfway and has never seen a difference.
TASKS = {"add": "sums, which the model half knows", "subtract": "differences, which are new to it"}
LORA_RATES = ["1e-3", "4e-3", "1.6e-2"]
FULL_RATES = ["2.5e-4", "1e-3", "4e-3"]
# Method -> how it is set, and its learning rates.
METHODS = {
    "rank 1": (("adapter=lora", "adapter.r=1"), LORA_RATES),
    "rank 16": (("adapter=lora", "adapter.r=16"), LORA_RATES),
    "rank 16, embeddings": (("adapter=lora", "adapter.r=16", "adapter.modules_to_save=[embed_tokens]"), LORA_RATES),
    "full": (("adapter=none",), FULL_RATES),
}
Cell = tuple[str, str, str, int]  # task, method, learning rate, seed


def settings(cell: Cell, steps: int, eval_rows: int) -> list[str]:
    task, method, rate, seed = cell
    return [
        *("model=tiny_sums", "data=sums", f"data.task={task}", f"data.eval_rows={eval_rows}", *METHODS[method][0]),
        *("scheduler=linear", f"optimizer.lr={rate}", "trainer.batch_size=32", "trainer.micro_batch_size=32"),
        *(f"trainer.max_steps={steps}", "checkpoint.every=null", f"seed={seed}"),
    ]


def measure(work: Path, rates: dict[str, list[str]], seeds: list[int], steps: int, eval_rows: int) -> dict[str, Any]:
    """Every learning rate with the first seed; the best one of each method with all seeds."""

    def run(cells: list[Cell]) -> None:
        run_all({folder_of(work, cell): settings(cell, steps, eval_rows) for cell in cells})

    grid = [(task, method, rate, seeds[0]) for task in TASKS for method in rates for rate in rates[method]]
    run(grid)
    first = {cell: final_loss(work, cell) for cell in grid}
    best = [min((cell for cell in grid if cell[:2] == (task, method)), key=first.get) for task in TASKS for method in rates]
    again = [(*cell[:3], seed) for seed in seeds[1:] for cell in best]
    run(again)
    cells = sorted(grid + again, key=order)
    return {
        "steps": steps,
        "seeds": seeds,
        "parameters": {method: trained_parameters(work, next(c for c in grid if c[1] == method)) for method in rates},
        "runs": [row(work, cell) for cell in cells],
    }


def order(cell: Cell) -> tuple[int, int, float, int]:
    task, method, rate, seed = cell
    return list(TASKS).index(task), list(METHODS).index(method), float(rate), seed


def folder_of(work: Path, cell: Cell) -> Path:
    return work / "-".join(map(str, cell)).replace(" ", "").replace(",", "-")


def final_loss(work: Path, cell: Cell) -> float:
    return list(curve(folder_of(work, cell), "eval/loss").values())[-1]


def trained_parameters(work: Path, cell: Cell) -> int:
    """Numbers in the checkpoint's adapter, or in the whole model."""
    from safetensors import safe_open

    checkpoint = max((folder_of(work, cell) / "checkpoints").glob("step-*"))
    count = 0
    for path in checkpoint.glob("adapter/*.safetensors" if cell[1] != "full" else "model/*.safetensors"):
        with safe_open(path, "np") as file:
            # The head is one weight with the embeddings, though an adapter's file has it twice.
            names = [name for name in file.keys() if "lm_head" not in name]  # noqa: SIM118
            count += sum(math.prod(file.get_slice(name).get_shape()) for name in names)
    return count


def row(work: Path, cell: Cell) -> dict[str, Any]:
    before, after = curve(folder_of(work, cell), "eval/loss").values()
    return {
        **dict(zip(("task", "method", "lr", "seed"), (cell[0], cell[1], float(cell[2]), cell[3]), strict=True)),
        "loss_before": before,
        "loss": after,
    }


# --- tables and plot --------------------------------------------------------------------------------------------------


def by_rate(result: dict[str, Any], task: str, method: str) -> dict[float, list[float]]:
    """learning rate -> the last held-out loss with each seed that it was run with."""
    found: dict[float, list[float]] = {}
    for run in result["runs"]:
        if (run["task"], run["method"]) == (task, method):
            found.setdefault(run["lr"], []).append(run["loss"])
    return found


def best_rate(losses: dict[float, list[float]]) -> float:
    """By the first seed, which all learning rates were run with."""
    return min(losses, key=lambda rate: losses[rate][0])


def tables(result: dict[str, Any]) -> dict[str, str]:
    return {"best": best(result)} | {task: grid(result, task) for task in TASKS}


def best(result: dict[str, Any]) -> str:
    header = ["method", "trained parameters", *(f"{task}: {what}" for task in TASKS for what in ("best rate", "held-out loss"))]
    rows = []
    for method in result["parameters"]:
        cells = []
        for task in TASKS:
            losses = by_rate(result, task, method)
            rate = best_rate(losses)
            cells += [f"{rate:g}", mean_sd(losses[rate], 3)]
        rows.append([method, f"{result['parameters'][method]:,}", *cells])
    return table(header, rows)


def grid(result: dict[str, Any], task: str) -> str:
    """First seed only: relative to each method's best, so that sensitivity shows."""
    methods = result["parameters"]
    every = [by_rate(result, task, method) for method in methods]
    columns = sorted({rate for losses in every for rate in losses})
    rows = []
    for method, losses in zip(methods, every, strict=True):
        values = {rate: losses[rate][0] for rate in losses}
        cells = [f"{values[rate]:.3f}" if rate in values else "" for rate in columns]
        rows.append([method, *(f"**{c}**" if rate == best_rate(losses) else c for rate, c in zip(columns, cells, strict=True))])
    return table(["method", *(f"{rate:g}" for rate in columns)], rows)


def plot(result: dict[str, Any]) -> Figure:
    figure, axes = new_figure(2, 10, 4)
    markers = dict(zip(METHODS, "osD^", strict=True))
    for axis, (task, title) in zip(axes, TASKS.items(), strict=True):
        for color, method in zip(COLORS, result["parameters"], strict=False):
            losses = by_rate(result, task, method)
            style = "--" if method == "full" else "-"
            label = f"{method} ({result['parameters'][method]:,})"
            axis.plot(
                list(losses), [v[0] for v in losses.values()], style + markers[method], color=color, label=label, markersize=5
            )
            best = best_rate(losses)
            if len(losses[best]) > 1:
                mean, sd = statistics.fmean(losses[best]), statistics.stdev(losses[best])
                axis.errorbar([best], [mean], [sd], color=color, capsize=4, linewidth=1.5)
        axis.set(title=f"{task}: {title}", xlabel="peak learning rate", xscale="log")
        ticks = sorted({run["lr"] for run in result["runs"]})
        axis.set_xticks(ticks, [f"{rate:g}" for rate in ticks])
        axis.minorticks_off()
    axes[0].set_ylabel("held-out loss, nats per answer token")
    axes[0].set_yscale("log")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return figure


STUDY = Study(
    folder=Path(__file__).resolve().parent,
    measure=measure,
    tables=tables,
    plot=plot,
    full={"rates": {method: rates for method, (_, rates) in METHODS.items()}, "seeds": [0, 1, 2], "steps": 100, "eval_rows": 512},
    short={"rates": {"rank 16": ["4e-3"], "full": ["1e-3"]}, "seeds": [0], "steps": 2, "eval_rows": 8},
)

if __name__ == "__main__":
    STUDY.main()
