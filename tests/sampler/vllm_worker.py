"""What each of two ranks does for test_vllm_ranks.py: a sharded trainer, then engines for each rank, then one for both."""

import json
from pathlib import Path

import torch
import torch.distributed as dist
from engines import answers, sharp_model
from sampling import PROMPTS

from twinkle_research.data_format import SamplingParams
from twinkle_research.model.prepare import prepare
from twinkle_research.model.transformers import TransformersModel
from twinkle_research.sampler.engine import EngineOptions
from twinkle_research.sampler.transformers import TransformersSampler
from twinkle_research.sampler.vllm import VLLMSampler
from twinkle_research.template import Template

PARAMS = SamplingParams(max_tokens=12, seed=3, num_samples=2, top_p=0.95, logprobs=1)


def dealt(sampler, runtime):
    """The answers to all prompts, which are dealt to the engines."""
    rank, size = sampler.data_parallel
    own = range(rank, len(PROMPTS), size)
    got = dict(zip(own, sampler.sample([PROMPTS[i] for i in own], PARAMS, prompt_indices=own), strict=True))
    everything = {}
    for share in runtime.gather_objects(got):
        for i, response in share.items():
            assert i not in everything or answers([everything[i]]) == answers([response])
            everything[i] = response
    return [everything[i] for i in range(len(PROMPTS))]


def main(runtime, folder):
    template = Template(prepare("tiny"))
    if runtime.is_main:
        sharp_model().module.save_pretrained(folder)
    runtime.barrier()
    model = TransformersModel(folder, runtime=runtime, sharding="fsdp2")
    model.set_optimizer("AdamW", lr=1e-2)
    rows = [{"messages": [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": text}]} for text in ("2", "two")]
    results = {}
    for size in (1, 2):
        sampler = VLLMSampler(folder, template, runtime, EngineOptions(tensor_parallel=size, max_model_len=64))
        assert sampler.data_parallel == ((runtime.rank, 2) if size == 1 else (0, 1))
        sampler.sync(model, 0)
        before = dealt(sampler, runtime)
        model.forward_backward(template.batch_encode([rows[runtime.rank]]))
        model.clip_grad_and_step()
        sampler.sync(model, 1)
        after = dealt(sampler, runtime)
        assert answers(before) != answers(after)
        if size == 2:
            unseeded = sampler.sample(PROMPTS[:2], SamplingParams(max_tokens=8))
            mine = [s.tokens for response in unseeded for s in response.sequences]
            assert runtime.gather_objects(mine) == [mine, mine]
        sampler.close()
        assert dist.all_reduce(ones := torch.ones(2)) is None and ones.tolist() == [2.0, 2.0]  # the trainer's group lives on
        with model.sampling() as module:
            plain = TransformersSampler(module, template).sample(PROMPTS, PARAMS)
        results[size] = answers(after) == answers(plain)
    if runtime.is_main:
        Path(folder, "results.json").write_text(json.dumps(results))
