"""Token or sequence normalisation when short and long answers share a batch. See README.md beside this file.

python -m experiments.loss_normalization
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
TASKS = ("short", "long")
NORMALIZATIONS = ("token", "sequence")
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


def train_py(*overrides: str) -> None:
    command = [
        sys.executable,
        "train.py",
        "tracking.progress=none",
        "tracking.tensorboard=false",
        "tracking.report=false",
        *overrides,
    ]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if result.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{result.stdout}{result.stderr}")


def train(work: Path, normalization: str, seed: int, micro_batch: int, steps: int) -> Path:
    """One training run; a folder that holds a finished one is left as it is."""
    run = work / f"{normalization}-seed{seed}-mb{micro_batch}"
    train_py(
        *("model=tiny", "adapter=none", "data=jsonl", f"data.path={work / 'data' / 'train.jsonl'}"),
        *(f"data.eval_path={work / 'data' / 'short.jsonl'}", "trainer.eval_every=20"),
        *(f"loss.normalization={normalization}", f"trainer.max_steps={steps}", "trainer.batch_size=16"),
        *(f"trainer.micro_batch_size={micro_batch}", "optimizer.lr=2e-3", f"seed={seed}", f"run_dir={run}"),
    )
    return run


def held_out_loss(run: Path, work: Path, task: str) -> float:
    """Nats per answer token on the held-out rows of one task."""
    path = work / "data" / f"{task}.jsonl"
    train_py(
        *("model=tiny", "adapter=none", "data=jsonl", f"data.path={path}", f"data.eval_path={path}"),
        *("eval_only=true", f"resume={run}", f"run_dir={run}-{task}"),
    )
    return json.loads((Path(f"{run}-{task}") / "evaluation.json").read_text())["eval/loss"]


def curve(run: Path, name: str = "loss") -> dict[int, float]:
    """step -> value of one metric, for the steps that have it."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row[name] for row in rows if name in row}


def compare(work: Path, steps: int, seeds: list[int]) -> list[dict]:
    """Held-out loss of both tasks for each normalisation, mean and spread over the seeds."""
    table = []
    for normalization in NORMALIZATIONS:
        runs = [train(work, normalization, seed, 4, steps) for seed in seeds]
        row = {"normalization": normalization}
        for task in TASKS:
            losses = [held_out_loss(run, work, task) for run in runs]
            row[task] = {"mean": statistics.mean(losses), "min": min(losses), "max": max(losses)}
        table.append(row)
    return table


def cut(work: Path, seed: int, micro_batches: list[int], steps: int = 50) -> list[dict]:
    """How far the training loss moves from that of micro-batches of 4 rows when the same batch is cut differently.

    The schedule is constant, so a short run must follow the beginning of the long one.
    """
    table = []
    for normalization in NORMALIZATIONS:
        reference = curve(work / f"{normalization}-seed{seed}-mb4")
        for size in micro_batches:
            other = curve(train(work, normalization, seed, size, steps))
            gaps = [abs(loss - reference[step]) / reference[step] for step, loss in other.items()]
            row = {"normalization": normalization, "micro_batch_size": size}
            table.append(row | {"first_10_steps": max(gaps[:10]), f"step_{steps}": gaps[-1]})
    return table


def plot(work: Path, seeds: list[int]) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "loss_normalization"  # the same picture is the same file
    figure, axes = plt.subplots(figsize=(6, 3.2))
    for color, normalization in zip(("tab:blue", "tab:orange"), NORMALIZATIONS, strict=True):
        for seed in seeds:
            losses = curve(work / f"{normalization}-seed{seed}-mb4", "eval/loss")
            label = normalization if seed == seeds[0] else None
            axes.plot(losses.keys(), losses.values(), color=color, alpha=0.7, lw=1, label=label)
    axes.set(xlabel="optimizer step", ylabel="held-out loss of short answers, nats")
    axes.legend()
    figure.tight_layout()
    figure.savefig(HERE / "curves.svg", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "loss_normalization", help="where the runs are kept")
    args = parser.parse_args()

    work = args.work.resolve()
    write_data(work / "data", train_rows=16 * args.steps, held_out_rows=64)
    result = {
        "steps": args.steps,
        "seeds": args.seeds,
        "held_out_loss": compare(work, args.steps, args.seeds),
        "cut": cut(work, args.seeds[0], args.micro_batches),
    }
    plot(work, args.seeds)
    (HERE / "result.json").write_text(json.dumps(result, indent=1) + "\n")

    print("held-out loss, nats per token (min to max over seeds)")
    for row in result["held_out_loss"]:
        cells = [f"{task} {row[task]['mean']:.4f} ({row[task]['min']:.4f} to {row[task]['max']:.4f})" for task in TASKS]
        print(f"  {row['normalization']:9}{'   '.join(cells)}")
    print("relative change of the training loss against micro_batch_size=4")
    for row in result["cut"]:
        name = f"{row['normalization']:9}micro_batch_size={row['micro_batch_size']:<3}"
        gaps = "   ".join(f"{key} {value:.1e}" for key, value in row.items() if "step" in key)
        print(f"  {name} {gaps}")


if __name__ == "__main__":
    main()
