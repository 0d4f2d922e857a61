"""Config of checkpoints."""

from dataclasses import dataclass
from typing import Optional


@dataclass
class CheckpointConfig:
    # Save every N optimizer steps (null: only at the end and when asked to stop).
    every: Optional[int] = 50
    # Newest checkpoints that stay; older ones are deleted.
    keep: int = 2
    # Also keep the best checkpoint: the lowest eval/loss, in reinforcement runs the highest eval/accuracy.
    keep_best: bool = True
    # Write in a background thread while training goes on (costs a copy of what is saved).
    background: bool = False
