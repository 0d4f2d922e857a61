"""What a data loader asks of a set of features."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np

from twinkle_research.dataset.order import keyed_permutation


class Features(ABC):
    """Features by number, their lengths without their tokens, and the order of an epoch."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> Any: ...

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    @property
    @abstractmethod
    def encoded(self) -> bool:
        """Whether ``self[i]`` is a feature."""

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """SHA-256 over what would be trained on."""

    @abstractmethod
    def lengths(self, numbers: np.ndarray) -> np.ndarray:
        """Tokens of the features ``numbers``, int64."""

    @property
    def rows_per_epoch(self) -> int:
        return len(self)

    def epoch_order(self, epoch: int, shuffle: bool, seed: int) -> np.ndarray:
        """Numbers of the features of an epoch, ``rows_per_epoch`` of them, keyed by (seed, epoch) where shuffled."""
        return keyed_permutation(len(self), seed, "data_order", epoch) if shuffle else np.arange(len(self))
