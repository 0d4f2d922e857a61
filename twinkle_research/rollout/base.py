"""What a rollout is: from prompts to scored completions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from twinkle_research.data_format import SamplingParams
from twinkle_research.rollout.batch import Completion

if TYPE_CHECKING:
    from twinkle_research.dataset.prompts import PromptDataset


class Clock(Protocol):
    """What measures how long the named parts of a step take."""

    def part(self, name: str) -> AbstractContextManager[None]: ...


@dataclass
class Played:
    """``counts``: what happened to the rewards that a person should know of, such as "math/timeouts", over all ranks."""

    completions: list[Completion]
    counts: dict[str, int]


class Rollout(ABC):
    """Plays out prompts with the sampler's present weights. One turn, or (agents) many."""

    @abstractmethod
    def __call__(
        self, prompts: PromptDataset, rows: Sequence[int], params: SamplingParams, *, step: int, purpose: str, first: int = 0
    ) -> Played:
        """``params.num_samples`` scored completions of each of ``rows`` (numbers in ``prompts``), in that order, on every rank.

        The draws are keyed by (``params.seed``, ``purpose``, ``step``, ``first`` + place in ``rows``, completion), so neither
        the number of ranks nor a resume changes them. Collective.
        """
