"""What does not fit, and what to write instead."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from functools import cache
from typing import Any

from twinkle_research.config.jobplan.fit import MOST_GPUS, Fit, nearest_fit
from twinkle_research.config.jobplan.memory import Memory
from twinkle_research.distributed.gpus import GIB, Hardware
from twinkle_research.model.config import LoraAdapterConfig
from twinkle_research.model.facts import Facts
from twinkle_research.sampler.choice import chosen_sampler
from twinkle_research.sampler.config import SamplerConfig, VLLMSamplerConfig
from twinkle_research.trainer.config import MuonConfig, TrainConfig

_REPLACED = ("backend", "sampler", "optimizer")  # sections of which another option may be proposed


def refusal(config: TrainConfig, facts: Facts, memory: Memory, hardware: Hardware, nodes: int, nproc: int) -> str:
    room = hardware.memory / GIB
    if memory.total > hardware.memory:
        phase = "training" if memory.training >= memory.sampling else "sampling"
        said = f"{phase} needs {memory.total / GIB:.1f} GiB on a GPU that has {room:.4g} ({hardware.name})"
    else:
        longest = config.data.max_length + config.sampler.max_tokens
        said = (
            f"the vLLM engine's share of {room:.4g} GiB ({hardware.name}) has room for {memory.sampler.tokens:,} tokens, less "
            f"than one completion of full length ({longest:,})"
        )
    said += f": {memory.text()}\n"
    if found := nearest_fit(config, facts, hardware, nodes, nproc):
        return f"{said}the nearest layout that fits{_proposed(config, found, nodes)}"
    none = f"no layout on up to {max(MOST_GPUS, nodes * nproc)} of them fits"
    for options in _others(config, facts):
        if found := nearest_fit(replace(config, **options), facts, hardware, nodes, nproc):
            found = replace(found, changes={name: option.name for name, option in options.items()} | found.changes)
            given = " and ".join(f"{name}={getattr(config, name).name}" for name in options)
            other = " and ".join(f"{name}={option.name}" for name, option in options.items())
            return f"{said}{none} with {given}; the nearest layout that fits with {other}{_proposed(config, found, nodes)}"
    return f"{said}{none}; {_remedy(config, memory, hardware)}"


def _remedy(config: TrainConfig, memory: Memory, hardware: Hardware) -> str:
    if memory.runtime >= hardware.memory:
        return f"the libraries alone take {memory.runtime / GIB:.1f} GiB"
    lora = isinstance(config.adapter, LoraAdapterConfig)
    return "lower data.max_length" + ("" if lora else ", or train a LoRA (adapter=lora)")


def _proposed(config: TrainConfig, found: Fit, nodes: int) -> str:
    machines = f" on {found.nodes} machines" if found.nodes != nodes else ""
    left_out = _left_out(config, found.config)
    without = f", without {' and '.join(left_out)}" if left_out else ""
    return f"{machines}{without}: {found.text()} ({found.memory.total / GIB:.1f} GiB)"


def _left_out(config: TrainConfig, proposed: TrainConfig) -> list[str]:
    """Settings that the config has given and that the option proposed instead does not know."""
    keys = []
    for section in _REPLACED:
        present, other = getattr(config, section), getattr(proposed, section)
        known = vars(other)
        unknown = [field.name for field in fields(present) if field.name not in known]
        if unknown:
            default = _default(section, present.name)
            keys += [f"{section}.{name}" for name in unknown if getattr(present, name) != getattr(default, name)]
    return keys


@cache
def _default(section: str, name: str) -> Any:
    """An option as it is where the config changes nothing of it."""
    from twinkle_research.config.composing import compose
    from twinkle_research.config.storage import to_object

    return getattr(to_object(compose([f"{section}={name}"])), section)


def _others(config: TrainConfig, facts: Facts) -> Iterator[dict[str, Any]]:
    """Options that need less memory, or leave more layouts: an engine that may be split where the sampler holds a model of its
    own, an optimizer that takes parts of matrices."""
    options: dict[str, Any] = {}
    sampler, optimizer = config.sampler, config.optimizer
    if isinstance(sampler, SamplerConfig) and chosen_sampler(sampler, facts, on_cpu=False).name != "vllm":
        common = {field.name: getattr(sampler, field.name) for field in fields(SamplerConfig) if field.name != "name"}
        options["sampler"] = VLLMSamplerConfig(**common)
    if isinstance(optimizer, MuonConfig):
        given, default, known = asdict(optimizer), asdict(_default("optimizer", optimizer.name)), _default("optimizer", "adamw")
        options["optimizer"] = replace(
            known, **{name: value for name, value in given.items() if name in vars(known) and value != default[name]}
        )
    yield from ({name: option} for name, option in options.items())
    if len(options) > 1:
        yield options
