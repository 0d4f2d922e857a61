"""Plans of jobs on GPUs that are not here, and what is refused of them."""

import functools
import re

import pytest

from twinkle_research.config import compose, validate
from twinkle_research.config.plan import RunPlan, run_plan
from twinkle_research.distributed.env import WorldInfo
from twinkle_research.errors import ConfigError
from twinkle_research.trainer.config import TrainConfig

DRY = ["dry_run=true", "data.sample_prompts=[]", "tracking.wandb.mode=disabled"]
H100 = "launch.gpu=h100_80gb"
FULL = ["backend=megatron", "adapter=none", "backend.distributed_optimizer=true"]
SAMPLED = ["loss=grpo", "sampler=vllm", "data.max_length=1024", "sampler.max_tokens=3072"]


@functools.cache
def config(*words: str) -> TrainConfig:
    sampled = any(word in ("loss=grpo", "loss=ppo") for word in words)
    return validate(compose([*(word for word in DRY if not (sampled and word.startswith("data."))), *words]))


@functools.cache
def plan(*words: str) -> RunPlan:
    return run_plan(config(*words), WorldInfo("plain"))


def refusal(*words: str) -> str:
    with pytest.raises(ConfigError) as refused:
        plan(*words)
    return str(refused.value)


def proposed(text: str) -> list[str]:
    found = re.search(r"the nearest layout that fits.*: (\S+=.*) \([\d.]+ GiB\)$", text)
    assert found, text
    return found[1].split()
