"""One GRPO step end to end (sample, score, train, log) against a bare loop with the same sampler, and against TRL's GRPOTrainer.

    python benchmarks/grpo_step.py                       a table
    python benchmarks/grpo_step.py --rounds 3 --steps 12

5 M parameters, one prompt x 8 completions x 64 tokens a step (answers that end earlier are rare with random weights), float32,
one thread, temperature 1, no KL term. The bare loop is what one would write by hand: our sampler on a transformers model, full
logits, the clipped objective at ratio 1, clip_grad_norm_, torch.optim.AdamW; nothing is recorded. TRL samples with transformers'
generate, its only way without vLLM. Each side is a process of its own; they take turns, so that a busy machine slows all of
them. Times are CPU seconds of the whole process between the ends of two optimizer steps; the table has the median over all
steps but the first of each turn.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

GENERATIONS, NEW_TOKENS, LR = 8, 64, 1e-4
QUESTION = "Tell me about the numbers between one and twenty."


def model_folder(root: Path) -> Path:
    """Random Qwen3 weights with the tokenizer of ``model=tiny``."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    from twinkle_research.model.prepare import prepare

    tokenizer = AutoTokenizer.from_pretrained(prepare("tiny"))
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=8192, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=1024, tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(root / "model")
    tokenizer.save_pretrained(root / "model")
    return root / "model"


def score(text: str) -> float:
    return sum(c.isalpha() for c in text) / max(1, len(text))


class Stopwatch:
    """CPU seconds between its calls."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.last: float | None = None

    def __call__(self) -> None:
        now = time.process_time()
        if self.last is not None:
            self.times.append(now - self.last)
        self.last = now


def ours(folder: Path, root: Path, steps: int, sampler: str) -> Stopwatch:
    from twinkle_research.config import compose, to_object
    from twinkle_research.config.plan import run_plan
    from twinkle_research.distributed.launcher import start
    from twinkle_research.trainer.loop import TrainingLoop

    watch, inner = Stopwatch(), TrainingLoop.finish_step

    def finish_step(self, row, tokens):
        inner(self, row, tokens)
        watch()

    TrainingLoop.finish_step = finish_step
    rows = root / "prompts.jsonl"
    rows.write_text((json.dumps({"prompt": QUESTION, "answer": ""}) + "\n") * steps)
    (root / "reward.py").write_text(
        "def reward(completion):\n    return sum(c.isalpha() for c in completion) / max(1, len(completion))\n"
    )
    cfg = to_object(
        compose(
            [
                "loss=grpo",
                "model=hf",
                f"model.path={folder}",
                f"sampler={sampler}",
                f"sampler.max_tokens={NEW_TOKENS}",
                "data=prompts",
                f"data.path={rows}",
                "data.max_length=128",
                "trainer.batch_size=1",
                "trainer.micro_batch_size=8",
                f"rollout.num_generations={GENERATIONS}",
                f"trainer.max_steps={steps}",
                f"optimizer.lr={LR}",
                "reward=function",
                f"reward.path={root / 'reward.py'}:reward",
                "tracking.wandb.mode=disabled",
                "tracking.progress=none",
                "checkpoint.every=null",
            ]
        )  # fmt: skip
    )
    if start(cfg, run_plan(cfg), root / "run"):
        raise SystemExit("our run failed")
    return watch


def bare(folder: Path, root: Path, steps: int) -> Stopwatch:
    import torch
    from transformers import AutoModelForCausalLM

    from twinkle_research.data_format import SamplingParams
    from twinkle_research.sampler.transformers import TransformersSampler
    from twinkle_research.template import Template

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    sampler = TransformersSampler(model, Template(folder))
    params = SamplingParams(max_tokens=NEW_TOKENS, seed=0, logprobs=1, num_samples=GENERATIONS)
    watch = Stopwatch()
    for step in range(steps):
        prompt = {"messages": [{"role": "user", "content": QUESTION}]}
        (answer,) = sampler.sample([prompt], params, step=step)
        rewards = torch.tensor([score(s.decoded) for s in answer.sequences])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        start, width = len(answer.prompt_token_ids), max(len(s.tokens) for s in answer.sequences)
        ids = torch.tensor([answer.prompt_token_ids + s.tokens + [0] * (width - len(s.tokens)) for s in answer.sequences])
        mask = torch.tensor([[1.0] * len(s.tokens) + [0.0] * (width - len(s.tokens)) for s in answer.sequences])
        logits = model(input_ids=ids).logits[:, start - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(-1, ids[:, start:, None]).squeeze(-1)
        ratio = (logprobs - logprobs.detach()).exp()
        objective = torch.minimum(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None])
        loss = -((objective * mask).sum(-1) / mask.sum(-1)).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        watch()
    return watch


def trl(folder: Path, root: Path, steps: int) -> Stopwatch:
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    watch = Stopwatch()

    class Watch(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            watch()

    config = GRPOConfig(
        output_dir=str(root / "trl"), per_device_train_batch_size=GENERATIONS, num_generations=GENERATIONS,
        max_completion_length=NEW_TOKENS, learning_rate=LR, beta=0.0, loss_type="grpo", max_steps=steps, use_cpu=True, bf16=False,
        gradient_checkpointing=False, report_to=[], save_strategy="no", logging_steps=1, disable_tqdm=True,
        lr_scheduler_type="constant", max_grad_norm=1.0,
    )  # fmt: skip
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": QUESTION}]}] * steps)

    def reward(completions, **kwargs):
        return [score(c[0]["content"]) for c in completions]

    trainer = GRPOTrainer(str(folder), reward_funcs=reward, args=config, train_dataset=data, callbacks=[Watch()])
    trainer.train()
    return watch


SIDES = {
    "bare loop": bare,
    "ours, transformers": lambda *args: ours(*args, "transformers"),
    "ours, vllm": lambda *args: ours(*args, "vllm"),
    "TRL": trl,
}


def turn(side: str, folder: Path, steps: int) -> list[float]:
    command = [sys.executable, __file__, "--side", side, "--folder", str(folder), "--steps", str(steps)]
    environment = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"} | os.environ
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{side}:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--side", choices=SIDES)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        if options.side:
            watch = SIDES[options.side](options.folder, Path(root), options.steps)
            print(json.dumps(watch.times))
            return
        folder = model_folder(Path(root))
        times: dict[str, list[float]] = {side: [] for side in SIDES}
        for _ in range(options.rounds):
            for side in SIDES:
                times[side] += turn(side, folder, options.steps)
    median = {side: statistics.median(values) for side, values in times.items()}
    print("| side | CPU seconds a step | bare loop = 1 | TRL = 1 |\n|---|---|---|---|")
    for side, value in median.items():
        print(f"| {side} | {value:.3f} | {value / median['bare loop']:.2f} | {value / median['TRL']:.2f} |")


if __name__ == "__main__":
    main()
