"""Config of the rollouts."""

from dataclasses import dataclass
from typing import Optional


@dataclass
class SingleTurnConfig:
    """One answer to each prompt."""

    name: str = "single"
    # Prompts of one rollout, over all ranks; a multiple of trainer.batch_size. null: trainer.batch_size.
    prompts_per_step: Optional[int] = None
    # Completions of each prompt: a group.
    num_generations: int = 8
    # Leave completions that were cut off by the length limit out of the loss, numerator and denominator.
    mask_truncated: bool = False
    # Leave out groups whose rewards are all equal and sample further prompts instead, until the rollout is full or N times
    # as many prompts were sampled (DAPO, arXiv:2503.14476, section 3.2). null: keep all groups.
    max_oversampling: Optional[int] = None
