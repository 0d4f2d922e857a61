"""SmolLM2-135M on real rows of uneven length, padded and packed: tokens a second, and the same losses.

    python benchmarks/packing.py [--steps 4] [--batch 16]

The rows are the project's identity rows as a chat template renders them. Three ways to cut the same optimizer steps into
micro-batches: 4 rows each, padded; a budget of tokens, padded; the same budget, packed. Each way is a process of its own;
they take turns, a step each, so that a busy machine slows all. Rates are of tokens that are in the rows, without padding,
per CPU second of the process with one thread (OMP_NUM_THREADS=1), the median over the steps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

BUDGET = 512
WAYS = {
    "padded, 4 rows": {"micro_batch_size": 4},
    f"padded, {BUDGET} tokens": {"micro_batch_tokens": BUDGET},
    f"packed, {BUDGET} tokens": {"micro_batch_tokens": BUDGET, "packing": True},
}


def batches(folder: str, size: int):
    """The identity rows in a keyed order, ``size`` a step, again and again."""
    from twinkle_research.dataloader import DataLoader
    from twinkle_research.dataset import Dataset, DatasetMeta
    from twinkle_research.template import Template

    rows = Dataset(DatasetMeta("builtin://identity")).map("SelfCognitionProcessor").set_template(Template(folder)).encode()
    loader = DataLoader(rows, batch_size=size, shuffle=True, drop_last=True)
    while True:
        yield from loader


def serve(way: str, folder: str, size: int, lora: bool) -> None:
    """Child process: answers each line with one step's tokens, CPU seconds and loss."""
    from twinkle_research.model.config import LoraAdapterConfig
    from twinkle_research.model.transformers import TransformersModel

    model = TransformersModel(folder)
    if lora:
        model.add_adapter_to_model("default", LoraAdapterConfig(r=16, alpha=32.0))
    model.set_optimizer("AdamW", lr=5e-4)
    model.set_processor("InputProcessor", **WAYS[way])
    steps = batches(folder, size)
    for _ in sys.stdin:
        rows = next(steps)
        start = time.process_time()
        model.forward_backward(rows, normalizer=model.count(rows))
        model.clip_grad_and_step(1.0)
        loss = model.calculate_metric(is_training=True).result["loss"]
        passes = len(model.trained().processor.split(rows))
        seconds = time.process_time() - start
        tokens = sum(row["length"] for row in rows)
        print(json.dumps({"tokens": tokens, "seconds": seconds, "loss": loss, "passes": passes}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4, help="measured steps, after one that warms up")
    parser.add_argument("--batch", type=int, default=16, help="rows in an optimizer step")
    parser.add_argument("--full", action="store_true", help="train all weights instead of a LoRA")
    parser.add_argument("--serve", nargs=2, metavar=("WAY", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(*options.serve, options.batch, not options.full)
        return
    from twinkle_research.model.prepare import prepare

    folder = str(prepare("smollm2_135m"))
    command = [sys.executable, __file__, "--batch", str(options.batch), *(["--full"] if options.full else [])]
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "HF_HUB_OFFLINE": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
    children = {way: subprocess.Popen([*command, "--serve", way, folder], **pipes) for way in WAYS}
    results: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(options.steps + 1):
        for way, child in children.items():
            child.stdin.write("step\n")
            child.stdin.flush()
            results[way].append(json.loads(child.stdout.readline()))
    for child in children.values():
        child.stdin.close()
        child.wait()
    first = next(iter(WAYS))
    rate = {way: statistics.median(r["tokens"] / r["seconds"] for r in found[1:]) for way, found in results.items()}
    print("| micro-batches | passes a step | tokens/s | ratio | largest gap of the loss |\n|---|---|---|---|---|")
    for way, found in results.items():
        gap = max(abs(a["loss"] - b["loss"]) for a, b in zip(found, results[first], strict=True))
        passes = statistics.mean(r["passes"] for r in found)
        print(f"| {way} | {passes:.1f} | {rate[way]:.0f} | {rate[way] / rate[first]:.2f} | {gap:.1e} |")


if __name__ == "__main__":
    main()
