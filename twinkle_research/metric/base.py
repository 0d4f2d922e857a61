"""What is measured while training: sums over calls and ranks, divided once when they are read."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from twinkle_research.data_format import InputFeature

Sums = dict[str, tuple[float, float]]  # name -> (sum, count), additive over calls and ranks


@dataclass
class CallRecord:
    """One forward_backward or forward_only of this rank."""

    loss_sum: float  # before the division by the normaliser
    count: int  # this call's share of the normaliser
    num_tokens: int  # trained positions
    extra: Sums = field(default_factory=dict)  # the loss's own metrics
    maxima: dict[str, float] = field(default_factory=dict)  # and those of which the largest counts
    features: Sequence[InputFeature] = ()
    logps: Sequence[Sequence[float]] = ()


@dataclass
class StepRecord:
    """One optimizer step, the same on all ranks."""

    grad_norm: float  # before clipping
    lr: float  # that this step used


class Metric(ABC):
    """Base of all metrics. ``sums`` are added up over ranks before ``calculate`` sees them."""

    @abstractmethod
    def accumulate(self, call: CallRecord) -> None: ...

    def on_step(self, step: StepRecord) -> None:  # noqa: B027 (most metrics do not look at steps)
        """Called after each optimizer step."""

    @abstractmethod
    def sums(self) -> Sums: ...

    def maxima(self) -> dict[str, float]:
        """Values of which the largest over all ranks counts; they are reported as they are."""
        return {}

    def calculate(self, sums: Mapping[str, tuple[float, float]]) -> dict[str, float]:
        """From the sums of all ranks, each divided by its count (0 where nothing was counted)."""
        return {name: total / count if count else 0.0 for name, (total, count) in sums.items()}

    @abstractmethod
    def reset(self) -> None: ...


class LossMetric(Metric):
    """``loss`` over everything since the last reading, divided by its whole normaliser, and the loss's own metrics."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._sums: Sums = {"loss": (0.0, 0.0)}
        self._maxima: dict[str, float] = {}

    def accumulate(self, call: CallRecord) -> None:
        self._sums = add_sums(self._sums, {"loss": (call.loss_sum, call.count), **call.extra})
        self._maxima = largest(self._maxima, call.maxima)

    def sums(self) -> Sums:
        return self._sums

    def maxima(self) -> dict[str, float]:
        return self._maxima


class TrainMetric(Metric):
    """``grad_norm`` and ``lr`` of the last optimizer step, and the trained ``tokens`` of all ranks since the last reading."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._tokens = 0
        self._step: StepRecord | None = None

    def accumulate(self, call: CallRecord) -> None:
        self._tokens += call.num_tokens

    def on_step(self, step: StepRecord) -> None:
        self._step = step

    def sums(self) -> Sums:
        return {"tokens": (self._tokens, 0)}

    def calculate(self, sums: Mapping[str, tuple[float, float]]) -> dict[str, float]:
        step = {} if self._step is None else {"grad_norm": self._step.grad_norm, "lr": self._step.lr}
        return step | {"tokens": int(sums["tokens"][0])}


def add_sums(*parts: Mapping[str, tuple[float, float]]) -> Sums:
    """Adds up; the order of the parts does not change the result (exact summation)."""
    names = dict.fromkeys(name for part in parts for name in part)
    result: Sums = {}
    for name in names:
        found = [part[name] for part in parts if name in part]
        result[name] = (_sum([total for total, _ in found]), _sum([count for _, count in found]))
    return result


def largest(*parts: Mapping[str, float]) -> dict[str, float]:
    """The largest value of each name; a NaN stays one."""
    names = dict.fromkeys(name for part in parts for name in part)
    found = {name: [part[name] for part in parts if name in part] for name in names}
    return {name: math.nan if any(map(math.isnan, values)) else max(values) for name, values in found.items()}


def _sum(values: list[float]) -> float:
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)
