"""Several data sets as one, by weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import numpy as np

from twinkle_research.data_format import InputFeature
from twinkle_research.dataset.base import Dataset
from twinkle_research.dataset.features import Features
from twinkle_research.dataset.interleave import interleaving
from twinkle_research.dataset.order import keyed_permutation
from twinkle_research.errors import ConfigError


class MixedDataset(Features):
    """Encoded data sets, drawn from in turns.

    ``self[i]`` counts through the features of the first source, then of the second, and so on; ``epoch_order`` says in
    which order they come. In the first n rows of an epoch, for every n, the number that source i gave differs from
    n * weights[i] / sum(weights) by less than one. A source gives its rows in an order keyed by (seed, source, pass) where
    shuffled, else in its own; all of them before any a second time, also across epochs.

    ``stop``: an epoch ends "first_exhausted": before any source would give more rows than it has; "all_exhausted": when
    every source has given as many as it has.
    """

    def __init__(self, datasets: Sequence[Dataset], weights: Sequence[float] | None = None, stop: str = "first_exhausted"):
        weights = [1.0] * len(datasets) if weights is None else list(weights)
        if not datasets or len(weights) != len(datasets):
            raise ConfigError(f"a mixture needs one weight a data set, got {len(weights)} for {len(datasets)}")
        if not all(dataset.encoded for dataset in datasets):
            raise ConfigError("encode must come before mixing")
        if any(dataset.template is not None and dataset.template.pairs for dataset in datasets):
            raise ConfigError("preferences cannot be mixed: a mixture draws features one by one")
        self.datasets = list(datasets)
        self.weights = weights
        self.stop = stop
        self.pattern = interleaving(weights, [len(dataset) for dataset in datasets], stop)
        self.starts = np.cumsum([0, *map(len, datasets)])  # numbers at which the sources begin

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, index: int) -> InputFeature:
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of a data set of {len(self)}")
        index %= len(self)
        source = int(np.searchsorted(self.starts, index, side="right")) - 1
        return self.datasets[source][index - int(self.starts[source])]

    @property
    def encoded(self) -> bool:
        return True

    @property
    def fingerprint(self) -> str:
        parts = [[dataset.fingerprint for dataset in self.datasets], self.weights, self.stop]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def lengths(self, numbers: np.ndarray) -> np.ndarray:
        sources = np.searchsorted(self.starts, numbers, side="right") - 1
        lengths = np.empty(len(numbers), np.int64)
        for source in np.unique(sources):
            here = sources == source
            lengths[here] = self.datasets[source].lengths(numbers[here] - self.starts[source])
        return lengths

    @property
    def rows_per_epoch(self) -> int:
        return len(self.pattern)

    @property
    def rows_of_sources(self) -> list[int]:
        """Rows that each source gives in an epoch."""
        return np.bincount(self.pattern, minlength=len(self.datasets)).tolist()

    def epoch_order(self, epoch: int, shuffle: bool, seed: int) -> np.ndarray:
        order = np.empty(len(self.pattern), np.int64)
        for source, (dataset, count) in enumerate(zip(self.datasets, self.rows_of_sources, strict=True)):
            # Source rows are counted through all epochs, so that a pass over a large source goes on in the next epoch.
            draws = np.arange(epoch * count, (epoch + 1) * count)
            passes, places = np.divmod(draws, len(dataset))
            if shuffle:
                for number in np.unique(passes):
                    here = passes == number
                    places[here] = keyed_permutation(len(dataset), seed, "mix_order", source, number)[places[here]]
            order[self.pattern == source] = self.starts[source] + places
        return order
