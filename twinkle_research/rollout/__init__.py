"""Rollouts: prompts to scored completions, as token ids. Names are resolved on first use."""

from typing import Any

__all__ = ["Completion", "RolloutBatch", "SingleTurnRollout"]


def __getattr__(name: str) -> Any:
    if name == "SingleTurnRollout":
        from twinkle_research.rollout.single_turn import SingleTurnRollout

        return SingleTurnRollout
    if name in ("Completion", "RolloutBatch"):
        from twinkle_research.rollout import batch

        return getattr(batch, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
