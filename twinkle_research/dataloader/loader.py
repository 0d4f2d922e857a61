"""DataLoader: which rows make up which optimizer step, on every rank, for ever the same."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import numpy as np

from twinkle_research.data_format import InputFeature
from twinkle_research.dataloader.balance import deal
from twinkle_research.dataset.base import Dataset
from twinkle_research.dataset.features import Features
from twinkle_research.dataset.order import keyed_permutation
from twinkle_research.errors import ConfigError, DataError


class DataLoader:
    """Iterating gives the REST of the current epoch, batch by batch; after its end, the next one.

    ``batch_size`` counts rows of a global batch, over all ranks; its row j is a feature with ``sample_index`` = j on one of
    them, or, where the data set's rows are lists of features (Pairs), those with 2j and 2j + 1. The rows of an encoded data
    set are dealt to ranks so that all have about as many tokens (``balance.deal``), those of others in turns; no rank has two
    rows more than another, and it may have none. The last, shorter batch of an epoch is kept unless ``drop_last``.
    Epoch e has an order of its own, keyed by (seed, e); nothing else, neither the number of ranks nor of workers,
    influences it. The position is one number: rows consumed since the start of training, over all ranks and epochs.

    ``dataset``: Features (a Dataset, a MixedDataset), or anything with ``len`` and ``[i]``. ``num_workers`` threads fetch
    rows ahead where fetching is slow.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        dp_rank: int = 0,
        dp_size: int = 1,
        num_workers: int = 0,
    ):
        if isinstance(dataset, Dataset) and dataset.template is not None and dataset.template.pairs:
            raise ConfigError("the features of this data set come in pairs, which must stay together: give Pairs of it")
        if batch_size < 1:
            raise ConfigError(f"batch_size must be >= 1, got {batch_size}")
        if not 0 <= dp_rank < dp_size:
            raise ValueError(f"dp_rank must be in [0, {dp_size}), got {dp_rank}")
        if num_workers < 0:
            raise ConfigError(f"num_workers must be >= 0, got {num_workers}")
        self.dataset = dataset
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.num_workers = num_workers
        rows = dataset.rows_per_epoch if isinstance(dataset, Features) else len(dataset)
        # Rows of one epoch: all, or those of its full batches.
        self.rows_per_epoch = rows - rows % batch_size if drop_last else rows
        if self.rows_per_epoch == 0:
            raise DataError(f"no batch of {batch_size} rows in {rows} rows" + (" with drop_last" if drop_last and rows else ""))
        self._consumed = 0
        self._order = lru_cache(maxsize=1)(self._epoch_order)

    @property
    def epoch(self) -> int:
        """The epoch (from 0) that the next batch belongs to."""
        return self._consumed // self.rows_per_epoch

    @property
    def consumed_train_samples(self) -> int:
        return self._consumed

    def __len__(self) -> int:
        """Batches in a whole epoch."""
        return -(-self.rows_per_epoch // self.batch_size)

    @property
    def steps_per_epoch(self) -> int:
        return len(self)

    def get_state(self) -> dict[str, int]:
        """Includes the batch that was given out last."""
        return {"consumed_train_samples": self._consumed}

    def load_state(self, state: dict[str, Any]) -> None:
        """Goes to the position that ``get_state`` gave."""
        self.skip_consumed_samples(state["consumed_train_samples"])

    def skip_consumed_samples(self, consumed_train_samples: int) -> None:
        """Goes to the position after this many rows, counted from the start of training."""
        if consumed_train_samples < 0:
            raise ValueError(f"consumed_train_samples must be >= 0, got {consumed_train_samples}")
        self._consumed = int(consumed_train_samples)

    def resume_from_checkpoint(self, consumed_train_samples: int) -> None:
        self.skip_consumed_samples(consumed_train_samples)

    def __iter__(self) -> Iterator[list[InputFeature]]:
        batches = self._rest_of_epoch()
        if self.num_workers == 0:
            for numbers in batches:
                self._consumed += len(numbers)
                yield [feature for j, number in self._own(numbers) for feature in self._fetch(j, number)]
            return
        with ThreadPoolExecutor(self.num_workers) as pool:
            ahead: deque[tuple[int, list[Any]]] = deque()
            for numbers in batches:
                ahead.append((len(numbers), [pool.submit(self._fetch, j, number) for j, number in self._own(numbers)]))
                if len(ahead) > 2:
                    yield self._take(ahead)
            while ahead:
                yield self._take(ahead)

    def _take(self, ahead: deque[tuple[int, list[Any]]]) -> list[InputFeature]:
        rows, futures = ahead.popleft()
        features = [feature for future in futures for feature in future.result()]
        self._consumed += rows
        return features

    def _rest_of_epoch(self) -> Iterator[np.ndarray]:
        order = self._order(self.epoch)
        for start in range(self._consumed % self.rows_per_epoch, self.rows_per_epoch, self.batch_size):
            yield order[start : min(start + self.batch_size, self.rows_per_epoch)]

    def _epoch_order(self, epoch: int) -> np.ndarray:
        if isinstance(self.dataset, Features):
            return self.dataset.epoch_order(epoch, self.shuffle, self.seed)
        rows = len(self.dataset)
        return keyed_permutation(rows, self.seed, "data_order", epoch) if self.shuffle else np.arange(rows)

    def _own(self, numbers: np.ndarray) -> Iterator[tuple[int, int]]:
        """(place in the global batch, number in the data set) of this rank's rows."""
        if self.dp_size > 1 and isinstance(self.dataset, Features) and self.dataset.encoded:
            places = deal(self.dataset.lengths(numbers).tolist(), self.dp_size)[self.dp_rank]
        else:
            places = range(self.dp_rank, len(numbers), self.dp_size)
        return ((j, int(numbers[j])) for j in places)

    def _fetch(self, place: int, number: int) -> list[InputFeature]:
        row = self.dataset[number]
        features = row if isinstance(row, list) else [row]
        return [{**feature, "sample_index": place * len(features) + k} for k, feature in enumerate(features)]
