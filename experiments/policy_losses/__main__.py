"""Policy losses with fresh and with reused samples. See README.md beside this file.

python -m experiments.policy_losses
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.common import COLORS, Study, band, curve, mean_of, mean_sd, new_figure, run_all, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BATCH = 8  # prompts in an optimizer step
# reused: a rollout is 4 batches, each seen 4 times; fresh: every update has new samples.
SAMPLES = {"reused": (f"rollout.prompts_per_step={4 * BATCH}", "trainer.inner_epochs=4"), "fresh": ()}
TITLES = {"reused": "reused: 16 updates a rollout", "fresh": "fresh: 1 update a rollout"}
LOSSES = {
    "grpo": ("loss=grpo",),
    "gspo": ("loss=gspo",),
    "cispo": ("loss=cispo",),
    "dr_grpo": ("loss=dr_grpo",),
    "rloo": ("loss=rloo",),
    "rloo + clip": ("loss=rloo", "loss.epsilon=0.2"),
}
ON_FRESH = ("grpo", "rloo")  # where ratios are 1 and answers equally long, each of the others is one of these: see README.md
STYLES = dict(zip(LOSSES, ("-", "--", "-.", "-", "--", ":"), strict=True))
Cell = tuple[str, str, int]  # samples, loss, seed


def settings(cell: Cell, steps: int, eval_every: int, eval_rows: int) -> list[str]:
    samples, loss, seed = cell
    return [
        *(*LOSSES[loss], *SAMPLES[samples], f"trainer.batch_size={BATCH}", "trainer.micro_batch_size=64"),
        *("sampler=transformers", "sampler.max_rows=512", f"data.eval_rows={eval_rows}"),
        *(f"trainer.max_steps={steps}", f"trainer.eval_every={eval_every}", "checkpoint.every=null", f"seed={seed}"),
    ]


def measure(work: Path, losses: list[str], seeds: list[int], steps: int, eval_every: int, eval_rows: int) -> dict[str, Any]:
    chosen = {"reused": losses, "fresh": [loss for loss in losses if loss in ON_FRESH]}
    cells = [(samples, loss, seed) for seed in seeds for samples in SAMPLES for loss in chosen[samples]]
    folders = {cell: work / "-".join(map(str, cell)).replace(" ", "") for cell in cells}
    run_all({folder: settings(cell, steps, eval_every, eval_rows) for cell, folder in folders.items()})
    runs = [row(folder, cell) for cell, folder in sorted(folders.items(), key=lambda item: place(item[0]))]
    return {"steps": steps, "losses": losses, "seeds": seeds, "runs": runs}


def place(cell: Cell) -> tuple[int, int, int]:
    """In result.json: by samples, loss, seed."""
    return list(SAMPLES).index(cell[0]), list(LOSSES).index(cell[1]), cell[2]


def row(run: Path, cell: Cell) -> dict[str, Any]:
    """What is kept of one run."""
    sampled, greedy, norms = (curve(run, name) for name in ("eval/mean@k", "eval/accuracy", "grad_norm"))
    return {
        **dict(zip(("samples", "loss", "seed"), cell, strict=True)),
        "eval_steps": list(sampled),
        "sampled": list(sampled.values()),
        "greedy": list(greedy.values()),
        # Shares of tokens beyond the bounds, means over all steps. None: the loss has no bounds.
        "clip_low": mean_of(run, "ratio/clip_low"),
        "clip_high": mean_of(run, "ratio/clip_high"),
        "entropy": statistics.fmean(list(curve(run, "entropy").values())[-10:]),  # nats a token, last 10 steps
        "grad_norm_first": norms[1],
        "grad_norm_above_1": statistics.fmean(norm > 1 for norm in norms.values()),  # trainer.max_grad_norm
    }


def of(result: dict[str, Any], samples: str) -> dict[str, list[dict[str, Any]]]:
    """loss -> its runs with these samples, by seed."""
    found: dict[str, list[dict[str, Any]]] = {}
    for run in result["runs"]:
        if run["samples"] == samples:
            found.setdefault(run["loss"], []).append(run)
    return found


# --- tables and plot --------------------------------------------------------------------------------------------------


def tables(result: dict[str, Any]) -> dict[str, str]:
    return {samples: learning(of(result, samples)) for samples in SAMPLES} | {"updates": updates(result)}


def learning(cells: dict[str, list[dict[str, Any]]]) -> str:
    """Right samples along the way and, at the end, against grpo with the same seed; right greedy answers at the end."""
    steps = cells["grpo"][0]["eval_steps"]
    header = ["loss", *(f"step {step}" for step in steps[1:]), "less grpo's, same seed", f"greedy, step {steps[-1]}"]
    rows = []
    for loss, runs in cells.items():
        points = [mean_sd([run["sampled"][i] for run in runs], 3) for i in range(1, len(steps))]
        gaps = [run["sampled"][-1] - other["sampled"][-1] for run, other in zip(runs, cells["grpo"], strict=True)]
        paired = "" if loss == "grpo" else mean_sd(gaps, 3, signed=True)
        rows.append([f"`{loss}`", *points, paired, mean_sd([run["greedy"][-1] for run in runs], 3)])
    return table(header, rows)


def updates(result: dict[str, Any]) -> str:
    """What the updates were like: means over the seeds."""
    header = ["samples", "loss", "below the lower bound", "above the upper", "entropy", "gradient norm, step 1", "above 1"]
    rows = []
    for samples in SAMPLES:
        for loss, runs in of(result, samples).items():
            bounds = [[run[name] for run in runs] for name in ("clip_low", "clip_high")]
            shares = ["no bound" if None in values else percent(values) for values in bounds]
            entropy = f"{statistics.fmean(run['entropy'] for run in runs):.3f}"
            norm = f"{statistics.fmean(run['grad_norm_first'] for run in runs):.2g}"
            rows.append([samples, f"`{loss}`", *shares, entropy, norm, percent([run["grad_norm_above_1"] for run in runs], 0)])
    return table(header, rows)


def percent(shares: list[float], digits: int = 1) -> str:
    return f"{100 * statistics.fmean(shares):.{digits}f} %"


def plot(result: dict[str, Any]) -> Figure:
    figure, axes = new_figure(3, 11.5, 4, width_ratios=(1, 1, 0.9), sharey=True)
    colors = dict(zip(LOSSES, COLORS, strict=True))
    for axis, (samples, title) in zip(axes, TITLES.items(), strict=False):
        for loss, runs in of(result, samples).items():
            mean, low, high = band([run["sampled"] for run in runs])
            steps = runs[0]["eval_steps"]
            axis.plot(steps, mean, STYLES[loss], color=colors[loss], linewidth=1.8, label=loss)
            axis.fill_between(steps, low, high, color=colors[loss], alpha=0.13, linewidth=0)
        axis.set(title=title, xlabel="optimizer step")
    axes[0].set_ylabel("right samples on held-out sums (mean ± sd)")
    axes[0].legend(loc="lower right", frameon=False, ncols=2)
    for shift, samples in zip((-0.15, 0.15), SAMPLES, strict=True):
        for loss, runs in of(result, samples).items():
            where = [list(LOSSES).index(loss) + shift] * len(runs)
            face = "white" if samples == "fresh" else colors[loss]
            axes[2].plot(where, [run["sampled"][-1] for run in runs], "o", color=colors[loss], markerfacecolor=face, markersize=5)
    axes[2].set_xticks(range(len(LOSSES)), LOSSES, rotation=30, ha="right")
    axes[2].set_title(f"step {result['steps']}, one point a seed\n(filled: reused, hollow: fresh)", fontsize=10)
    return figure


STUDY = Study(
    folder=Path(__file__).resolve().parent,
    measure=measure,
    tables=tables,
    plot=plot,
    full={"losses": list(LOSSES), "seeds": [0, 1, 2], "steps": 100, "eval_every": 25, "eval_rows": 512},
    short={"losses": ["grpo", "rloo"], "seeds": [0], "steps": 2, "eval_every": 1, "eval_rows": 8},
)

if __name__ == "__main__":
    STUDY.main()
