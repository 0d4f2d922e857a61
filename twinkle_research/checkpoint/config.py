"""Config of checkpoints."""

from dataclasses import dataclass
from enum import Enum
from typing import Optional


class CheckpointFormat(Enum):
    consolidated = "consolidated"  # whole tensors, as in a Hugging Face folder, written by the main process
    sharded = "sharded"  # each process writes the parts that it has


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
    # How tensors are written; a run continues from either. sharded, for backend=megatron, writes from all processes at once.
    format: CheckpointFormat = CheckpointFormat.consolidated
