"""Tokens a second of the two samplers: ours on a transformers model over transformers' generate, ours on vLLM over bare vLLM.

    python benchmarks/sampler.py
    python benchmarks/sampler.py --case 135m --against vllm --turns 5 --json result.json

Prompts in groups of 8 completions, temperature 1, no filter, float32; a completion ends at its end token or at a limit. Ours
returns log-probabilities, and so does bare vLLM; generate does not. Bare vLLM is its LLM class with its own settings for CPUs
(oneDNN with packed weights), eager. Each side is a process of its own; they take turns with the same prompts, new ones each
turn, so that a busy machine slows all. Rates are sampled tokens (end tokens included) per CPU second of the process with one
thread, the median over the turns; a ratio is the median of the turns' ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

GROUP = 8


@dataclass(frozen=True)
class Case:
    model: str
    prompts: int
    max_tokens: int
    calls: int  # of the sampler in one turn


CASES = {
    "135m": Case("smollm2_135m", prompts=4, max_tokens=64, calls=1),
    "135m-long": Case("smollm2_135m", prompts=2, max_tokens=256, calls=1),
    "tiny": Case("tiny_sums", prompts=16, max_tokens=8, calls=20),
}
PAIRS = {"ours, transformers": "generate", "ours, vllm": "vllm"}  # side: what it is measured against


def questions(case: Case, key: str) -> list[str]:
    """Sums for the tiny model, word problems of uneven length for the other."""
    rng = random.Random(key)
    if case.model == "tiny_sums":
        return [f"{rng.randrange(100):02d}+{rng.randrange(100):02d}=" for _ in range(case.prompts)]
    found = []
    for _ in range(case.prompts):
        parts = [f"{rng.choice(['Ann', 'Ben', 'Ida'])} has {rng.randrange(2, 60)} apples and buys {rng.randrange(2, 30)} more."]
        parts += [f"Then {rng.randrange(2, 9)} friends come and each of them takes one." for _ in range(rng.randrange(4))]
        found.append(" ".join([*parts, "How many apples are left? Think step by step, then give the number after ####."]))
    return found


class Side:
    def __init__(self, name: str, case: Case) -> None:
        import torch

        from twinkle_research.model.prepare import prepare
        from twinkle_research.template import Template

        self.case, self.folder = case, prepare(case.model)
        self.template = Template(self.folder)
        self.end = self.template.tokenizer.eos_token_id
        torch.set_num_threads(1)
        self.sample = {
            "generate": self.generate,
            "ours, transformers": self.ours_on_transformers,
            "vllm": self.vllm,
            "ours, vllm": self.ours_on_vllm,
        }[name]()

    def prompts(self, key: str) -> list[list[int]]:
        rows = [{"prompt": text} for text in questions(self.case, key)]
        return [feature["input_ids"] for feature in self.template.batch_encode(rows, add_generation_prompt=True)]

    def module(self):
        import torch
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32).eval()

    def generate(self):
        import torch

        module = self.module()
        settings = {
            "do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "num_return_sequences": GROUP,
            "max_new_tokens": self.case.max_tokens, "pad_token_id": 0, "eos_token_id": self.end,
        }  # fmt: skip

        def sample(prompts: list[list[int]]) -> int:
            width = max(map(len, prompts))
            ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
            mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
            out = module.generate(input_ids=ids, attention_mask=mask, **settings)[:, width:].tolist()
            return sum(row.index(self.end) + 1 if self.end in row else len(row) for row in out)

        return sample

    def ours_on_transformers(self):
        from twinkle_research.sampler.transformers import TransformersSampler

        return self.ours(TransformersSampler(self.module(), self.template))

    def ours_on_vllm(self):
        from twinkle_research.model.transformers import TransformersModel
        from twinkle_research.sampler.engine import EngineOptions
        from twinkle_research.sampler.vllm import VLLMSampler

        sampler = VLLMSampler(self.folder, self.template, options=EngineOptions(max_model_len=1024))
        sampler.sync(TransformersModel(self.folder), 0)
        return self.ours(sampler)

    def ours(self, sampler):
        from twinkle_research.data_format import SamplingParams

        params = SamplingParams(max_tokens=self.case.max_tokens, num_samples=GROUP, logprobs=1)
        return lambda prompts: sum(len(s.tokens) for r in sampler.sample(prompts, params) for s in r.sequences)

    def vllm(self):
        from twinkle_research.sampler.vllm_env import engine_environment

        with engine_environment("cpu", {}):
            import vllm

            llm = vllm.LLM(
                model=str(self.folder), dtype="float32", skip_tokenizer_init=True, max_model_len=1024, enforce_eager=True,
                kv_cache_memory_bytes=2**30, block_size=32, generation_config="vllm", logprobs_mode="processed_logprobs",
            )  # fmt: skip
            params = vllm.SamplingParams(
                n=GROUP, temperature=1.0, max_tokens=self.case.max_tokens, logprobs=0, detokenize=False, stop_token_ids=[self.end]
            )

        def sample(prompts: list[list[int]]) -> int:
            inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
            outputs = llm.generate(inputs, params, use_tqdm=False)
            return sum(len(completion.token_ids) for output in outputs for completion in output.outputs)

        return sample


def serve(name: str, case: Case) -> None:
    """Child process: answers each line with the tokens and CPU seconds of a turn."""
    side = Side(name, case)
    for line in sys.stdin:
        batches = [side.prompts(f"{line.strip()} {call}") for call in range(case.calls)]
        start = time.process_time()
        tokens = sum(side.sample(prompts) for prompts in batches)
        print(json.dumps({"tokens": tokens, "seconds": time.process_time() - start}), flush=True)


def measure(name: str, sides: list[str], turns: int) -> dict[str, list[dict[str, float]]]:
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    children = {
        side: subprocess.Popen(
            [sys.executable, __file__, "--serve", side, "--case", name], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            text=True, env=environment,
        )
        for side in sides
    }  # fmt: skip
    results: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    try:
        for turn in range(turns + 1):  # the first warms up
            for side in sides if turn % 2 else reversed(sides):
                children[side].stdin.write(f"{turn}\n")
                children[side].stdin.flush()
                results[side].append(json.loads(children[side].stdout.readline()))
    finally:
        for child in children.values():
            child.stdin.close()
            child.wait()
    return {side: found[1:] for side, found in results.items()}


def rate(result: dict[str, float]) -> float:
    return result["tokens"] / result["seconds"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, action="append", help="may be given several times; default: all")
    parser.add_argument("--against", choices=PAIRS.values(), help="default: both, vllm where it is installed")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(options.serve, CASES[options.case[0]])
    from twinkle_research.sampler.vllm_env import vllm_installed

    wanted = [options.against] if options.against else PAIRS.values() if vllm_installed() else ["generate"]
    pairs = {side: other for side, other in PAIRS.items() if other in wanted}
    table = {}
    print("| case | sampler | tokens/s | against | tokens/s | ratio |\n|---|---|---|---|---|---|")
    for name in options.case or CASES:
        results = table[name] = measure(name, [side for pair in pairs.items() for side in pair], options.turns)
        for side, other in pairs.items():
            ratio = statistics.median(rate(a) / rate(b) for a, b in zip(results[side], results[other], strict=True))
            mine, theirs = (statistics.median(map(rate, results[s])) for s in (side, other))
            print(f"| {name} | {side} | {mine:,.0f} | {other} | {theirs:,.0f} | {ratio:.2f} |", flush=True)
    if options.json:
        options.json.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
