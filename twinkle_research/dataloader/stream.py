"""StreamLoader: global batches of features that are made while they are used, exactly resumable."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import islice
from typing import Any

from twinkle_research.data_format import InputFeature
from twinkle_research.dataloader.balance import deal
from twinkle_research.dataset.stream import START, IterableDataset, Position
from twinkle_research.errors import ConfigError

logger = logging.getLogger(__name__)


class StreamLoader:
    """Iterating gives the REST of the current pass over the source, batch by batch; after its end, the next pass.

    The rest is empty only where the rows are no longer those of the run that is continued: it may give no batch, but a
    whole pass without one raises DataError.

    As DataLoader, but in the order of the source and without a length. Every rank reads and encodes all rows, and takes its
    share of each global batch. The position is the pass (epoch), a row of the source and a feature of it, so that a run
    which is continued reads the rows before it again but does not encode them.
    """

    steps_per_epoch = None  # shows at the end of a pass

    def __init__(self, dataset: IterableDataset, *, batch_size: int, dp_rank: int = 0, dp_size: int = 1):
        if batch_size < 1:
            raise ConfigError(f"batch_size must be >= 1, got {batch_size}")
        if not 0 <= dp_rank < dp_size:
            raise ValueError(f"dp_rank must be in [0, {dp_size}), got {dp_rank}")
        self.dataset = dataset
        self.batch_size = batch_size
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.epoch = 0  # the epoch (from 0) that the next batch belongs to
        self._position = START
        self._consumed = 0

    @property
    def consumed_train_samples(self) -> int:
        return self._consumed

    def get_state(self) -> dict[str, Any]:
        """Includes the batch that was given out last."""
        stream = {"epoch": self.epoch, **self._position._asdict()}
        return {"consumed_train_samples": self._consumed, "stream": stream}

    def load_state(self, state: dict[str, Any]) -> None:
        """Goes to the position that ``get_state`` gave."""
        self._consumed = state["consumed_train_samples"]
        self.epoch = state["stream"]["epoch"]
        self._position = Position(state["stream"]["row"], state["stream"]["features"])

    def resume_from_checkpoint(self, consumed_train_samples: int) -> None:
        """Goes to the position after this many rows, counted from the start of training. All of them are encoded again;
        ``load_state`` only reads them."""
        if consumed_train_samples < 0:
            raise ValueError(f"consumed_train_samples must be >= 0, got {consumed_train_samples}")
        self.epoch, self._position, self._consumed = 0, START, 0
        while self._consumed < consumed_train_samples:
            for _ in self._batches(1):
                if self._consumed == consumed_train_samples:
                    break

    def __iter__(self) -> Iterator[list[InputFeature]]:
        for batch in self._batches(self.batch_size):
            places = deal([feature["length"] for feature in batch], self.dp_size)[self.dp_rank]
            yield [{**batch[j], "sample_index": j} for j in places]

    def _batches(self, size: int) -> Iterator[list[InputFeature]]:
        """Global batches of the rest of the pass. One more feature is looked at, to tell the last batch."""
        features = self.dataset.features(self._position)
        first = next(features, None)
        if first is None:
            logger.warning(
                "%s: nothing that can be trained on is left after row %d of pass %d, so its next pass begins; is what makes "
                "the rows still what it was?", self.dataset.meta.name, self._position.row + 1, self.epoch + 1,
            )  # fmt: skip
            self.epoch, self._position = self.epoch + 1, START
        while first is not None:
            batch = [first, *islice(features, size - 1)]
            first = next(features, None)
            self._consumed += len(batch)
            if first is None:
                self.epoch, self._position = self.epoch + 1, START
            else:
                self._position = batch[-1][0]
            yield [feature for _, feature in batch]
