"""What the config group ``reward`` says, carried out."""

from __future__ import annotations

from typing import Any

from twinkle_research.errors import ConfigError
from twinkle_research.reward.base import Part, Reward, Scorer
from twinkle_research.reward.config import (
    CombinedRewardConfig,
    CountdownRewardConfig,
    ExactRewardConfig,
    FormatRewardConfig,
    FunctionRewardConfig,
    Gsm8kRewardConfig,
    LengthRewardConfig,
    MathRewardConfig,
    NumericRewardConfig,
    ReasoningGymRewardConfig,
    Unscored,
    rewards_of,
)
from twinkle_research.reward.countdown import CountdownReward
from twinkle_research.reward.function import FunctionReward
from twinkle_research.reward.gsm8k import GSM8KAccuracyReward
from twinkle_research.reward.length import LengthReward
from twinkle_research.reward.math import MathReward
from twinkle_research.reward.reasoning_gym import ReasoningGymReward
from twinkle_research.reward.text import ExactReward, FormatReward, NumericReward


def build_reward(config: Any) -> Scorer:
    """The scorer that ``config`` (group ``reward``) asks for. It may hold processes: close it.

    Raises ConfigError for a config that cannot be, UserError where a package is missing.
    """
    configs = rewards_of(config)
    if not configs:
        raise ConfigError(f"reward={config.name} gives no reward")
    combined = isinstance(config, CombinedRewardConfig)
    weights = [part.weight for part in config.parts] if combined else [1.0]
    names = _names([own.name for own in configs.values()])
    parts: list[Part] = []
    try:
        for name, weight, (key, own) in zip(names, weights, configs.items(), strict=True):
            parts.append(Part(name, weight, _build_one(own, key)))
    except BaseException:
        for part in parts:
            part.reward.close()
        raise
    return Scorer(parts, skip_unscored=combined and config.unscored is Unscored.skip)


def _build_one(config: Any, key: str) -> Reward:
    match config:
        case ExactRewardConfig():
            return ExactReward(config.ignore_case)
        case NumericRewardConfig():
            return NumericReward(config.tolerance)
        case FormatRewardConfig():
            return FormatReward(config.tags, config.pattern)
        case Gsm8kRewardConfig():
            return GSM8KAccuracyReward(flexible=config.flexible, format_score=config.format_score)
        case MathRewardConfig():
            return MathReward("answer", workers=config.workers, timeout=config.timeout)
        case LengthRewardConfig():
            return LengthReward(config.max_tokens, config.cache, kind=config.kind.name)
        case CountdownRewardConfig():
            return CountdownReward(config.format_score)
        case ReasoningGymRewardConfig():
            return ReasoningGymReward(workers=config.workers, timeout=config.timeout)
        case FunctionRewardConfig():
            return FunctionReward(config.path, config.per.name, dict(config.args), key=f"{key}.path")
    raise TypeError(f"no reward for {type(config).__name__}")


def _names(names: list[str]) -> list[str]:
    """The second part called x is x_2."""
    return [name if (n := names[:i].count(name)) == 0 else f"{name}_{n + 1}" for i, name in enumerate(names)]
