"""Config of the advantages; each default is the algorithm's own recipe."""

from dataclasses import dataclass
from enum import Enum


class Scale(Enum):
    group = "group"  # divided by the std of the group's rewards
    batch = "batch"  # divided by the std of all rewards of the rollout
    none = "none"


class Std(Enum):
    sample = "sample"  # n - 1 below the sum of squares, as torch
    population = "population"  # n, as numpy


class Baseline(Enum):
    mean = "mean"  # of the group
    leave_one_out = "leave_one_out"  # of the group's other answers


class RewardKL(Enum):
    k1 = "k1"  # log policy - log reference
    k2 = "k2"  # half its square
    k3 = "k3"  # e^d - d - 1 of d = log reference - log policy


class GlobalBaseline(Enum):
    none = "none"
    group = "group"  # the mean reward of the group


class Whitening(Enum):
    token = "token"  # mean and std over all tokens of the rollout
    sequence = "sequence"  # mean and std over its answers
    none = "none"


@dataclass
class AdvantageConfig:
    """What all advantages have."""

    name: str = "advantage"
    # Weight of the KL to the reference that is taken off the reward; 0: none.
    kl_coef: float = 0.0
    kl_estimator: RewardKL = RewardKL.k1


@dataclass
class GRPOAdvantageConfig(AdvantageConfig):
    name: str = "grpo"
    baseline: Baseline = Baseline.mean
    scale: Scale = Scale.group
    std: Std = Std.sample
    # Added to the std.
    eps: float = 1e-8


@dataclass
class RLOOAdvantageConfig(AdvantageConfig):
    name: str = "rloo"
    scale: Scale = Scale.none
    std: Std = Std.sample
    # Added to the std.
    eps: float = 1e-8


@dataclass
class OPOAdvantageConfig(AdvantageConfig):
    name: str = "opo"


@dataclass
class ReinforcePPAdvantageConfig(AdvantageConfig):
    name: str = "reinforce_pp"
    baseline: GlobalBaseline = GlobalBaseline.none
    whiten: Whitening = Whitening.token
    std: Std = Std.population
    # Added to the std.
    eps: float = 1e-8
    # Discount of a token's later rewards.
    gamma: float = 1.0


@dataclass
class GAEAdvantageConfig(AdvantageConfig):
    name: str = "gae"
    # Discount of a token's later rewards.
    gamma: float = 1.0
    # Weight of later temporal differences: 0 one step ahead, 1 the whole answer.
    gae_lambda: float = 0.95
    # Whether advantages get mean 0 and std 1 over all tokens of the rollout.
    normalize: bool = True
    std: Std = Std.population
    # Added to the std.
    eps: float = 1e-8
