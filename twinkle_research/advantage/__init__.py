"""Advantages: from the rewards of a whole rollout to what each answer's tokens count. Importing this does not import torch."""

from __future__ import annotations

import dataclasses
from enum import Enum
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from twinkle_research.advantage.base import Advantage

# Short name, which is that of the file -> class. The dataclass XConfig of advantage/config.py describes the class X.
ADVANTAGES = {
    "grpo": "GRPOAdvantage",
    "rloo": "RLOOAdvantage",
    "opo": "OPOAdvantage",
    "reinforce_pp": "ReinforcePPAdvantage",
    "gae": "GAEAdvantage",
}
_OF_BASE = ("Advantage", "AdvantageResult", "Rollouts")

__all__ = ["build_advantage", *_OF_BASE, *ADVANTAGES.values()]


def build_advantage(cfg: Any) -> Advantage:
    """The advantage that ``conf/advantage/<name>.yaml`` describes: each setting of ``cfg`` is an option of that name."""
    names = [node.__name__.removesuffix("Config") for node in type(cfg).__mro__]
    values = {field.name: getattr(cfg, field.name) for field in dataclasses.fields(cfg) if field.name != "name"}
    options = {name: value.value if isinstance(value, Enum) else value for name, value in values.items()}
    return _class_of(next(name for name in names if name in ADVANTAGES.values()))(**options)


def _class_of(name: str) -> type[Advantage]:
    module = next(module for module, cls in ADVANTAGES.items() if cls == name)
    return getattr(import_module(f"twinkle_research.advantage.{module}"), name)


def __getattr__(name: str) -> Any:
    if name in ADVANTAGES.values():
        return _class_of(name)
    if name in _OF_BASE:
        return getattr(import_module("twinkle_research.advantage.base"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
