"""What tasks have in common: questions that are made here, by number, and which of all questions are held out."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np

from twinkle_research.dataset.config import CommonDataConfig, GeneratedDataConfig
from twinkle_research.dataset.rows import OnBad, Origin, Row
from twinkle_research.dataset.sources import Source
from twinkle_research.randomness import derive_seed

SPLITS = ("train", "eval")
_SETTINGS_OF_ALL = {field.name for field in dataclasses.fields(CommonDataConfig)} | {"rows", "held_out"}


class Task(ABC):
    """Questions of one split. Question i depends on ``config.seed``, the split and i, not on how many there are.

    Each question is on one side for ever: a hash of it, keyed by ``config.seed``, says which, and ``config.held_out`` is the
    share that only the split "eval" gives. So training with any number of rows, in any run, sees none of them.
    """

    def __init__(self, config: GeneratedDataConfig, split: str, length: int):
        self.config = config
        self.split = split
        self.length = length

    def __len__(self) -> int:
        return self.length

    @abstractmethod
    def row(self, index: int) -> Row:
        """``prompt``, ``answer``, ``completion`` (a right one), and what the reward needs beside."""

    def digest(self) -> str:
        """SHA-256 over all that decides the rows, but the code."""
        own = {k: v for k, v in dataclasses.asdict(self.config).items() if k not in _SETTINGS_OF_ALL}
        parts = [self.config.name, self.split, self.length, self.config.held_out, own]
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


class TaskSource(Source):
    """The rows of a task, as those of a file."""

    def __init__(self, task: Task):
        self.task = task
        self.name = f"{task.config.name}/{task.split}"

    @property
    def names(self) -> list[str]:
        return [self.name]

    def rows(self, on_bad: OnBad) -> Iterator[tuple[Origin, Row]]:
        return ((Origin(self.name, i), self.task.row(i)) for i in range(len(self.task)))

    def digest(self) -> str:
        return self.task.digest()


def held_out(keys: np.ndarray, seed: int, share: float) -> np.ndarray:
    """Which of the questions ``keys`` (uint64) are held out: about ``share`` of them, chosen by a hash of seed and key.

    The hash is the finaliser of SplitMix64 (Steele, Lea & Flood 2014, figure 14), on 2^53 steps of ``share``.
    """
    z = keys.astype(np.uint64) + np.uint64(derive_seed(seed, "held_out"))
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = z ^ (z >> np.uint64(31))
    return (z >> np.uint64(11)) < np.uint64(round(share * 2**53))


def is_held_out(question: Any, seed: int, share: float) -> bool:
    """As ``held_out``, for one question that JSON can write."""
    return derive_seed(seed, "held_out", json.dumps(question, sort_keys=True)) < share * 2**63
