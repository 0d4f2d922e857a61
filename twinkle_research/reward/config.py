"""Config of the rewards."""

from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, Dict, List, Optional

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from twinkle_research.errors import ConfigError, nearest


@dataclass
class ExactRewardConfig:
    """1 where the completion, without space around it, is the row's answer; else 0."""

    name: str = "exact"
    # Whether upper and lower case are the same.
    ignore_case: bool = False


@dataclass
class NumericRewardConfig:
    """1 where the last number of the completion is the row's answer; else 0."""

    name: str = "numeric"
    # How far it may be from the answer.
    tolerance: float = 0.0


@dataclass
class FormatRewardConfig:
    """1 where the whole completion has the form that is asked for; else 0. Give `tags` or `pattern`."""

    name: str = "format"
    # <a>...</a> for each of them, in this order, each once, and nothing else.
    tags: List[str] = field(default_factory=lambda: ["think", "answer"])
    # Or a regular expression (Python's) for the whole completion; . also matches line ends.
    pattern: Optional[str] = None


@dataclass
class Gsm8kRewardConfig:
    """1 where the number after the last #### or in the last \\boxed{} is the row's answer; else 0."""

    name: str = "gsm8k"
    # Take the last number where there is neither.
    flexible: bool = False
    # Given for a wrong number in the right place.
    format_score: float = 0.0


@dataclass
class MathRewardConfig:
    """1 where math-verify finds the completion's result equal to the row's answer; else 0."""

    name: str = "math"
    # Processes that compare.
    workers: int = 1
    # Seconds for one completion. One that takes longer is not scored, and counted.
    timeout: float = 5.0


class LengthKind(Enum):
    overlong = "overlong"  # DAPO's soft overlong punishment
    linear = "linear"  # minus the share of max_tokens that was used


@dataclass
class LengthRewardConfig:
    """A penalty in [-1, 0] for long completions; for use in a combined reward."""

    name: str = "length"
    kind: LengthKind = LengthKind.overlong
    # Tokens from which the penalty is -1. null: sampler.max_tokens.
    max_tokens: Optional[int] = None
    # overlong: the penalty grows over the last `cache` tokens before max_tokens. null: a fifth of max_tokens.
    cache: Optional[int] = None


@dataclass
class CountdownRewardConfig:
    """1 where the completion is an expression of the row's numbers, each used once, that makes its target; else 0."""

    name: str = "countdown"
    # Given for an expression of the right numbers that misses the target.
    format_score: float = 0.0


@dataclass
class ReasoningGymRewardConfig:
    """What the data set of reasoning-gym itself says, in [0, 1]."""

    name: str = "reasoning_gym"
    # Processes that judge.
    workers: int = 1
    # Seconds for one completion. One that takes longer is not scored, and counted.
    timeout: float = 10.0


class Per(Enum):
    auto = "auto"  # from the names of the parameters
    sample = "sample"
    batch = "batch"


@dataclass
class FunctionRewardConfig:
    """Your own function or class."""

    name: str = "function"
    # my.module.fn, or file.py:fn
    path: str = MISSING
    per: Per = Per.auto
    # Arguments of a class.
    args: Dict[str, Any] = field(default_factory=dict)


class PartName(Enum):
    exact = "exact"
    numeric = "numeric"
    format = "format"
    gsm8k = "gsm8k"
    math = "math"
    length = "length"
    countdown = "countdown"
    reasoning_gym = "reasoning_gym"
    function = "function"


@dataclass
class RewardPart:
    """One reward of several."""

    reward: PartName = MISSING
    weight: float = 1.0
    # Its own settings, as in conf/reward/<reward>.yaml.
    options: Dict[str, Any] = field(default_factory=dict)


class Unscored(Enum):
    """What becomes of a completion that one of the parts cannot judge."""

    unscored = "unscored"  # it has no reward
    skip = "skip"  # its reward is that of the other parts


@dataclass
class CombinedRewardConfig:
    name: str = "combined"
    parts: List[RewardPart] = field(default_factory=list)
    unscored: Unscored = Unscored.unscored


REWARDS = {
    config().name: config
    for config in (
        ExactRewardConfig, NumericRewardConfig, FormatRewardConfig, Gsm8kRewardConfig, MathRewardConfig, LengthRewardConfig,
        CountdownRewardConfig, ReasoningGymRewardConfig, FunctionRewardConfig,
    )
}  # fmt: skip


def part_config(part: RewardPart, key: str) -> Any:
    """The dataclass of a part, its options filled in. ``key`` names the part in errors. Raises ConfigError."""
    schema = OmegaConf.structured(REWARDS[part.reward.name])
    known = [f.name for f in fields(REWARDS[part.reward.name]) if f.name != "name"]
    for name in part.options:
        if name not in known:
            raise ConfigError(f"unknown key '{key}.options.{name}'; {nearest(name, known)}")
    try:
        merged = OmegaConf.merge(schema, part.options)
        if missing := sorted(OmegaConf.missing_keys(merged)):
            raise ConfigError(f"'{key}.options.{missing[0]}' is not set")
        return OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ConfigError(f"'{key}.options': {str(error).splitlines()[0]}") from error


def rewards_of(reward: Any) -> Dict[str, Any]:
    """The config of each reward that the group names, by its key: "reward", or "reward.parts[0]", ...; none for reward=none."""
    if isinstance(reward, CombinedRewardConfig):
        keys = [f"reward.parts[{number}]" for number in range(len(reward.parts))]
        return {key: part_config(part, key) for key, part in zip(keys, reward.parts)}
    return {"reward": reward} if isinstance(reward, tuple(REWARDS.values())) else {}
