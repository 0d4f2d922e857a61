"""The loader for training data of either kind."""

from __future__ import annotations

from twinkle_research.dataloader.loader import DataLoader
from twinkle_research.dataloader.stream import StreamLoader
from twinkle_research.dataset.features import Features
from twinkle_research.dataset.stream import IterableDataset


def build_loader(
    dataset: Features | IterableDataset, *, batch_size: int, shuffle: bool, seed: int, dp_rank: int, dp_size: int
) -> DataLoader | StreamLoader:
    if isinstance(dataset, IterableDataset):
        return StreamLoader(dataset, batch_size=batch_size, dp_rank=dp_rank, dp_size=dp_size)
    return DataLoader(dataset, batch_size=batch_size, shuffle=shuffle, seed=seed, dp_rank=dp_rank, dp_size=dp_size)
