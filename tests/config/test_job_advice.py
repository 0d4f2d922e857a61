"""Advice that a refused plan gives, typed in: random settings that cannot be, over models and machines."""

import copy
import functools
import random
import re
from enum import Enum
from typing import Any

import pytest

from twinkle_research.config import compose, validate
from twinkle_research.config.plan import run_plan
from twinkle_research.distributed.env import WorldInfo
from twinkle_research.errors import ConfigError
from twinkle_research.trainer.config import TrainConfig

MODELS = ("qwen3_0_6b", "qwen3_8b", "qwen2_5_7b", "llama3_1_70b", "mixtral_8x7b", "qwen3_30b_a3b", "qwen3_235b_a22b")
MOST_ADVICES = 5
Words = dict[str, str]


@functools.cache
def chosen(*options: str) -> TrainConfig:
    return validate(compose(["dry_run=true", "tracking.wandb.mode=disabled", *options]), files=False)


def built(words: Words) -> TrainConfig:
    """Options are composed once; settings are laid over a copy of that, which is quicker."""
    options = tuple(f"{key}={value}" for key, value in words.items() if "." not in key)
    config = copy.deepcopy(chosen(*options))
    for key, text in words.items():
        section, _, name = key.partition(".")
        if name:
            node = getattr(config, section)
            setattr(node, name, value_of(text, getattr(node, name)))
    if config.rollout.name != "none":
        config.rollout.prompts_per_step = config.trainer.batch_size  # as conf/ has it
    return config


def value_of(text: str, present: Any) -> Any:
    if isinstance(present, Enum):
        return type(present)[text]
    known = {"true": True, "false": False, "null": None, "[]": []}
    if text in known:
        return known[text]
    if text in ("h100_80gb", "a100_80gb", "b200_180gb"):
        from twinkle_research.trainer.config import Gpu

        return Gpu[text]
    return float(text) if "." in text else int(text)


def refused(words: Words) -> str | None:
    """What is said, None where the plan is accepted."""
    try:
        run_plan(validate(built(words)), WorldInfo("plain"))
    except ConfigError as error:
        return str(error)
    return None


# --- reading advice -------------------------------------------------------------------------------------------------

_NEAREST = re.compile(r"(?:the nearest layout that fits[^:]*): (\S+=.*) \([\d.]+ GiB\)$")
_WITHOUT = re.compile(r"(?:fits|machines)(?:[^:]*), without ([^:]*):")
_START = re.compile(r"start (\d+)(?: or \d+)* of them")
_MACHINES = re.compile(r"with launch\.nodes=(\d+)")
_SETTINGS = re.compile(r"(?:write|give) ((?:[\w.]+=[\w.\[\]]+ ?)+)")
_NUMBER = re.compile(r"(?:write|give) (\w+)")
_KEY = re.compile(r"'?([a-z_]+\.[a-z_]+)'?")


def problems(text: str) -> list[str]:
    """What a refusal names: a problem in each line, or that a plan does not fit."""
    return [text] if _NEAREST.search(text) else text.splitlines()


def advice(problem: str) -> tuple[Words, list[str]]:
    """The first one that is given: what to write, and what to leave out."""
    if found := _NEAREST.search(problem):
        without = _WITHOUT.search(problem.splitlines()[-1])
        left_out = re.split(r", | and ", without[1]) if without else []
        return dict(word.split("=", 1) for word in found[1].split()), left_out
    before, _, after = problem.rpartition("; ")
    if found := _SETTINGS.match(after):
        return dict(word.split("=", 1) for word in found[1].split()), []
    if found := _START.search(after):
        words = {"launch.nproc_per_node": found[1]}
        if machines := _MACHINES.search(after):
            words["launch.nodes"] = machines[1]
        return words, []
    found, key = _NUMBER.match(after), _KEY.match(before)
    assert found and key, f"no advice in: {problem}"
    return {key[1]: found[1]}, []


def typed(words: Words, text: str) -> Words:
    """With the first advice for each problem."""
    changed = dict(words)
    for problem in reversed(problems(text)):
        changes, left_out = advice(problem)
        assert any(words.get(key) != value for key, value in changes.items()), f"{words} already has that: {problem}"
        changed = {key: value for key, value in changed.items() if key not in left_out} | changes
    return changed


def fits_nowhere(text: str) -> bool:
    return "of them fits; " in text


# --- settings -------------------------------------------------------------------------------------------------------


def settings(number: int) -> Words:
    draw = random.Random(number)
    words = {"model": draw.choice(MODELS), "backend": draw.choice(["megatron", "megatron", "megatron", "transformers"])}
    words["adapter"] = draw.choice(["lora", "none"])
    samples = draw.random() < 0.4
    words |= {"loss": "grpo", "sampler": "vllm"} if samples else {}
    words["launch.gpu"] = draw.choice(["h100_80gb", "a100_80gb", "b200_180gb"])
    words["launch.nodes"] = str(draw.choice([1, 1, 2, 3, 4, 5, 12, 64]))
    words["trainer.batch_size"] = str(draw.choice([8, 64, 512]))
    words["trainer.micro_batch_size"] = str(draw.choice([1, 4, 16]))
    words["data.max_length"] = str(draw.choice([256, 2048, 8000]))

    def sometimes(key: str, *values: object, often: float = 0.5) -> None:
        if draw.random() < often:
            words[key] = str(draw.choice(values))

    sometimes("launch.nproc_per_node", 1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
    if samples:
        sometimes("sampler.tensor_parallel", 2, 3, 4, 8, 16)
        sometimes("sampler.gpu_memory_utilization", 0.1, 0.5)
    if words["backend"] == "transformers":
        sometimes("backend.sharding", "ddp", "fsdp2")
        return words
    sometimes("backend.tensor_parallel", 1, 2, 3, 4, 5, 7, 8, 16)
    sometimes("backend.pipeline_parallel", 1, 2, 3, 4, 7, 8, 12)
    sometimes("backend.context_parallel", 1, 2, 3, 5, 8, often=0.3)
    sometimes("backend.expert_parallel", 1, 2, 3, 4, 6, 12, 16, 24)
    sometimes("backend.expert_tensor_parallel", 1, 2, 3, 8, often=0.2)
    sometimes("backend.virtual_stages", 1, 2, 3, often=0.2)
    sometimes("backend.sequence_parallel", "true", "false", often=0.2)
    sometimes("backend.recompute", "full", "selective", often=0.3)
    sometimes("backend.recompute_layers", 1, 2, 5, often=0.2)
    sometimes("backend.distributed_optimizer", "true")
    return words


@pytest.mark.parametrize("numbers", [range(60), pytest.param(range(60, 460), marks=pytest.mark.long)], ids=["some", "many"])
def test_advice_is_worth_typing_in(numbers: range) -> None:
    """What was named is gone then, and at most five rounds of it lead to a plan, or to the word that none fits."""
    refusals = 0
    for number in numbers:
        words, said = settings(number), []
        while (text := refused(words)) is not None and not fits_nowhere(text):
            said.append(text)
            assert len(said) <= MOST_ADVICES, (number, said)
            words = typed(words, text)
            after = refused(words)
            assert not any(problem in (after or "").splitlines() for problem in problems(text)), (number, words, after)
        refusals += len(said)
    assert refusals > len(numbers)
