"""Config of the losses; each default is the algorithm's own recipe."""

from dataclasses import dataclass
from enum import Enum


class Normalization(Enum):
    token = "token"  # sum over trained tokens / trained tokens of the optimizer step
    sequence = "sequence"  # mean over each row's trained tokens, then over the rows of the optimizer step


@dataclass
class CrossEntropyConfig:
    name: str = "cross_entropy"
    normalization: Normalization = Normalization.token
    label_smoothing: float = 0.0
    z_loss: float = 0.0
