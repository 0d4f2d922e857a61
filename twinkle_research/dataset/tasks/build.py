"""The task that a config asks for."""

from __future__ import annotations

from twinkle_research.dataset.config import CountdownDataConfig, GeneratedDataConfig, ReasoningGymDataConfig, SumsDataConfig
from twinkle_research.dataset.tasks.base import Task


def build_task(config: GeneratedDataConfig, split: str) -> Task:
    """``split``: "train" or "eval". Raises ConfigError where there are not as many questions as are asked for."""
    if isinstance(config, SumsDataConfig):
        from twinkle_research.dataset.tasks.sums import Sums

        return Sums(config, split)
    if isinstance(config, CountdownDataConfig):
        from twinkle_research.dataset.tasks.countdown import Countdown

        return Countdown(config, split)
    if isinstance(config, ReasoningGymDataConfig):
        from twinkle_research.dataset.tasks.reasoning_gym import ReasoningGym

        return ReasoningGym(config, split)
    raise TypeError(f"no task for {type(config).__name__}")
