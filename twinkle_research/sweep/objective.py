"""Which number the jobs of a sweep are compared by: the ``objective`` of status.json, and what it is there."""

from __future__ import annotations

from dataclasses import dataclass

from twinkle_research.dataset.config import eval_path_of
from twinkle_research.errors import ConfigError
from twinkle_research.trainer.config import RlTrainerConfig, TrainConfig


@dataclass(frozen=True)
class Objective:
    """``metric``: its name in metrics.jsonl, whose last value is the objective. ``direction``: minimize or maximize."""

    metric: str
    direction: str


def objective_of(config: TrainConfig) -> Objective | None:
    """None for a reinforcement run that is never evaluated: its training loss does not say how good the model is."""
    evaluated = config.data.eval_rows > 0 or eval_path_of(config.data) is not None
    if isinstance(config.trainer, RlTrainerConfig):
        return Objective("eval/accuracy", "maximize") if evaluated else None
    return Objective("eval/loss" if evaluated else "loss", "minimize")


def objective_of_study(config: TrainConfig, direction: str | None) -> Objective:
    """As ``objective_of``, for a study, which needs one. Raises ConfigError where ``direction`` contradicts it."""
    objective = objective_of(config)
    if objective is None:
        raise ConfigError(
            "a study of reinforcement runs compares eval/accuracy: let the runs be evaluated, with data.eval_rows=64 for example"
        )
    if direction is not None and direction != objective.direction:
        better = "lower" if objective.direction == "minimize" else "higher"
        raise ConfigError(
            f"hydra.sweeper.direction={direction}: the objective of these runs is {objective.metric}, which is better when "
            f"{better}; leave it out, or give {objective.direction}"
        )
    return objective
