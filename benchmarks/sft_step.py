"""One supervised step against a bare loop over the same model: time, peak memory, equal losses.

    python benchmarks/sft_step.py                       all cases, a table
    python benchmarks/sft_step.py --case 135m-lora-half --steps 6

The bare loop is what one would write by hand: model(input_ids, attention_mask, labels) of transformers with full logits,
clip_grad_norm_, torch.optim.AdamW; for the megatron cases Megatron-Core's DistributedDataParallel, schedule, optimizer and
cross entropy over the same layers, packed in the same way. Each side is a process of its own (so peak memory can be told
apart); they take turns, a few steps each, so that a busy machine slows both. Times are CPU seconds of the whole process with
one thread unless OMP_NUM_THREADS says otherwise; the ratio is the median over the turns. Both sides must reach the same
losses.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


@dataclass(frozen=True)
class Case:
    model: str
    lora: bool
    masked: float  # share of the tokens that are not trained
    rows: int
    length: int
    ragged: bool = False
    backend: str = "transformers"


CASES = {
    "0.2m-full": Case("0.2m", False, 0.0, 8, 64),
    "0.2m-lora-half": Case("0.2m", True, 0.5, 8, 64),
    "5m-full": Case("5m", False, 0.0, 8, 128),
    "5m-full-half": Case("5m", False, 0.5, 8, 128),
    "5m-full-ragged": Case("5m", False, 0.5, 8, 128, ragged=True),
    "5m-lora-half": Case("5m", True, 0.5, 8, 128),
    "5m-megatron": Case("5m", False, 0.0, 8, 128, backend="megatron"),
    "5m-megatron-half": Case("5m", False, 0.5, 8, 128, backend="megatron"),
    "135m-full": Case("135m", False, 0.0, 8, 128),
    "135m-full-half": Case("135m", False, 0.5, 8, 128),
    "135m-lora": Case("135m", True, 0.0, 8, 128),
    "135m-lora-half": Case("135m", True, 0.5, 8, 128),
}

# hidden size, MLP size, layers, heads, vocabulary
SIZES = {"0.2m": (64, 192, 3, 2, 512), "5m": (256, 768, 4, 4, 8192)}
LR = 1e-4


def model_folder(name: str, root: Path) -> str:
    """Random Llama weights for the small sizes, SmolLM2-135M-Instruct for the large one."""
    if name == "135m":
        from twinkle_research.model.prepare import prepare

        return str(os.environ.get("SMOLLM2_FOLDER") or prepare("smollm2_135m"))
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, mlp, layers, heads, vocabulary = SIZES[name]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=mlp, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=heads // 2, max_position_embeddings=1024, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(root / name)
    return str(root / name)


def make_rows(case: Case, vocabulary: int, step: int) -> list[dict[str, list[int]]]:
    """Labels pre-shifted; the trained tokens are the last part of each row, as in a chat."""
    rng = random.Random(step)
    rows = []
    for i in range(case.rows):
        length = rng.randint(case.length // 4, case.length) if case.ragged and i else case.length
        ids = [rng.randrange(vocabulary) for _ in range(length)]
        first = int(length * case.masked)
        labels = [ids[t + 1] if t + 1 < length and t >= first else -100 for t in range(length)]
        rows.append({"input_ids": ids, "labels": labels, "length": length, "sample_index": i})
    return rows


class Bare:
    def __init__(self, folder: str, case: Case) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        if case.lora:
            from peft import LoraConfig, get_peft_model

            from twinkle_research.model.transformers.lora import init_lora

            self.model = get_peft_model(
                self.model, LoraConfig(target_modules="all-linear", r=16, lora_alpha=32, task_type="CAUSAL_LM")
            )
            init_lora(self.model, "default", seed=0)  # the same start, so that the losses can be compared
        self.model.train()
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=LR)

    def step(self, rows: list[dict[str, list[int]]]) -> float:
        torch = self.torch
        width = max(row["length"] for row in rows)
        # transformers shifts by itself: the label of a token stands at the token
        labels = [[-100, *row["labels"][:-1]] + [-100] * (width - row["length"]) for row in rows]
        ids = torch.tensor([row["input_ids"] + [0] * (width - row["length"]) for row in rows])
        mask = torch.tensor([[1] * row["length"] + [0] * (width - row["length"]) for row in rows])
        loss = self.model(input_ids=ids, attention_mask=mask, labels=torch.tensor(labels)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


class BareMegatron:
    """One process."""

    def __init__(self, folder: str, case: Case) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        from twinkle_research.model.megatron import MegatronModel
        from twinkle_research.model.megatron.shim import device_shim

        self.shim = device_shim
        with device_shim():
            (self.chunk,) = MegatronModel(folder).chunks
            self.chunk.requires_grad_(True)
            wrapping = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
            self.model = DistributedDataParallel(self.chunk.config, wrapping, self.chunk)
            settings = OptimizerConfig(
                optimizer="adam", lr=LR, adam_beta2=0.999, adam_eps=1e-8, weight_decay=0.01, clip_grad=1.0, bf16=False
            )
            self.optimizer = get_megatron_optimizer(settings, [self.model])

    def step(self, rows: list[dict[str, list[int]]]) -> float:
        import torch
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.packed_seq_params import PackedSeqParams
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

        lengths = [row["length"] for row in rows]
        ends = torch.tensor([0, *lengths]).cumsum(0).int()
        packed = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths)
        )
        ids = torch.tensor([[token for row in rows for token in row["input_ids"]]])
        labels = torch.tensor([label for row in rows for label in row["labels"]])[:, None]
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        trained = labels != -100

        def forward(batches, model):
            hidden = model(next(batches), positions, None, packed_seq_params=packed)

            def loss(hidden):
                logits, _ = self.chunk.output_layer(hidden, weight=self.chunk.output_weight)
                losses = vocab_parallel_cross_entropy(logits, labels.clamp(min=0))
                total = (losses * trained).sum() / trained.sum()
                return total, torch.tensor(1, dtype=torch.int), {"loss": total.detach()}

            return hidden, loss

        with self.shim():
            (found,) = get_forward_backward_func()(
                forward_step_func=forward, data_iterator=iter([ids]), model=[self.model], num_microbatches=1,
                seq_length=ids.shape[1], micro_batch_size=1, forward_only=False,
            )  # fmt: skip
            finalize_model_grads([self.model])
            self.optimizer.step()
            for group in self.optimizer.param_groups:  # mcore's scheduler would do this
                group["weight_decay"] = 0.01 * group["wd_mult"]
            self.model.zero_grad_buffer()
            self.optimizer.zero_grad()
        return float(found["loss"])


class Ours:
    def __init__(self, folder: str, case: Case) -> None:
        from twinkle_research.model import MegatronModel, TransformersModel
        from twinkle_research.model.config import LoraAdapterConfig

        self.model = {"transformers": TransformersModel, "megatron": MegatronModel}[case.backend](folder)
        if case.lora:
            self.model.add_adapter_to_model("default", LoraAdapterConfig(r=16, alpha=32.0))
        self.model.set_processor("InputProcessor", micro_batch_size=case.rows)
        self.model.set_optimizer("AdamW", lr=LR)

    def step(self, rows: list[dict[str, list[int]]]) -> float:
        self.model.forward_backward(rows, normalizer=self.model.count(rows))
        self.model.clip_grad_and_step(1.0)
        return self.model.calculate_metric(is_training=True).result["loss"]


def serve(side: str, folder: str, case: Case) -> None:
    """Child process: answers each line "first count" with seconds, losses and peak memory."""
    from transformers import AutoConfig

    vocabulary = AutoConfig.from_pretrained(folder).vocab_size
    bare = BareMegatron if case.backend == "megatron" else Bare
    runner = (bare if side == "bare" else Ours)(folder, case)
    for line in sys.stdin:
        first, count = map(int, line.split())
        batches = [make_rows(case, vocabulary, step) for step in range(first, first + count)]
        cpu, wall = time.process_time(), time.perf_counter()
        losses = [runner.step(rows) for rows in batches]
        answer = {"cpu": time.process_time() - cpu, "wall": time.perf_counter() - wall, "losses": losses, "peak": peak_memory()}
        print(json.dumps(answer), flush=True)


def peak_memory() -> int:
    """High-water mark of resident memory, bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def measure(name: str, turns: int, steps: int, root: Path) -> dict[str, float]:
    case = CASES[name]
    folder = model_folder(case.model, root)
    env = {"OMP_NUM_THREADS": "1", **os.environ, "HF_HUB_OFFLINE": "1"}
    sides = {
        side: subprocess.Popen(
            [sys.executable, __file__, "--serve", side, folder, name],
            env=env,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for side in ("bare", "ours")
    }

    def ask(side: str, first: int, count: int) -> dict[str, float]:
        sides[side].stdin.write(f"{first} {count}\n")
        sides[side].stdin.flush()
        return json.loads(sides[side].stdout.readline())

    try:
        results = {side: [ask(side, 0, 2)] for side in sides}  # warm-up, not counted
        for turn in range(turns):
            for side in list(sides) if turn % 2 else reversed(list(sides)):
                results[side].append(ask(side, 2 + turn * steps, steps))
    finally:
        for process in sides.values():
            process.stdin.close()
            process.wait()
    bare, ours = results["bare"], results["ours"]
    gap = max(abs(a - b) for x, y in zip(bare, ours, strict=True) for a, b in zip(x["losses"], y["losses"], strict=True))
    row = {"steps": turns * steps, "loss_gap": gap, "bare_gib": bare[-1]["peak"] / 2**30, "ours_gib": ours[-1]["peak"] / 2**30}
    for clock in ("cpu", "wall"):
        row[f"bare_{clock}"] = statistics.median(r[clock] for r in bare[1:]) / steps
        row[f"ours_{clock}"] = statistics.median(r[clock] for r in ours[1:]) / steps
        row[f"ratio_{clock}"] = statistics.median(y[clock] / x[clock] for x, y in zip(bare[1:], ours[1:], strict=True))
    row["ratio_memory"] = ours[-1]["peak"] / bare[-1]["peak"]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, action="append", help="may be given several times; default: all")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, help="steps in one turn; default: 2 for 135m, 10 for 5m, 50 for 0.2m")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(args.serve[0], args.serve[1], CASES[args.serve[2]])
    table = {}
    heads = ["bare s", "ours s", "ratio", "wall", "bare GiB", "ours GiB", "ratio", "loss gap"]
    print("case".ljust(18) + "".join(head.rjust(width) for head, width in zip(heads, (9, 9, 8, 8, 10, 10, 8, 11))))
    with tempfile.TemporaryDirectory() as root:
        for name in args.case or CASES:
            steps = args.steps or {"135m": 2, "5m": 10, "0.2m": 50}[CASES[name].model]
            r = table[name] = measure(name, args.turns, steps, Path(root))
            print(
                f"{name:18}{r['bare_cpu']:9.4f}{r['ours_cpu']:9.4f}{r['ratio_cpu']:8.3f}{r['ratio_wall']:8.3f}"
                f"{r['bare_gib']:10.2f}{r['ours_gib']:10.2f}{r['ratio_memory']:8.3f}{r['loss_gap']:11.1e}",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
