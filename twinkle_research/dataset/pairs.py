"""The features of an encoded data set two by two."""

from __future__ import annotations

import numpy as np

from twinkle_research.data_format import InputFeature
from twinkle_research.dataset.base import Dataset
from twinkle_research.dataset.features import Features


class Pairs(Features):
    """``dataset``: encoded with a template that has ``pairs=True``, so that each row gave two features. ``self[i]`` is the list
    [chosen, rejected]; lengths and orders are those of pairs."""

    def __init__(self, dataset: Dataset):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset) // 2

    def __getitem__(self, index: int) -> list[InputFeature]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"pair {index} of a data set of {len(self)}")
        first = 2 * (index % len(self))
        return [self.dataset[first], self.dataset[first + 1]]

    @property
    def encoded(self) -> bool:
        return self.dataset.encoded

    @property
    def fingerprint(self) -> str:
        return self.dataset.fingerprint

    def lengths(self, numbers: np.ndarray) -> np.ndarray:
        """Tokens of both answers and their prompts."""
        return self.dataset.lengths(2 * numbers) + self.dataset.lengths(2 * numbers + 1)
