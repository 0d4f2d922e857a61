"""The metrics of one adapter, for training or for evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twinkle_research.errors import ConfigError, nearest
from twinkle_research.metric.base import CallRecord, LossMetric, Metric, StepRecord, TrainMetric, add_sums, largest
from twinkle_research.symbols import construct

METRICS = {"LossMetric": LossMetric, "TrainMetric": TrainMetric}


class Meter:
    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def add(self, metric: Any, **options: Any) -> None:
        """An instance, a class or the name of a class of METRICS. One of a kind: a second replaces the first."""
        if isinstance(metric, str):
            if metric not in METRICS:
                raise ConfigError(f"unknown metric {metric!r}; {nearest(metric, METRICS)}")
            metric = METRICS[metric]
        metric = construct(metric, "add_metric", **options)
        if not isinstance(metric, Metric):
            raise ConfigError(f"a metric is a Metric, its class or its name, got {metric!r}")
        self._metrics = [m for m in self._metrics if type(m) is not type(metric)] + [metric]

    def accumulate(self, call: CallRecord) -> None:
        for metric in self._metrics:
            metric.accumulate(call)

    def on_step(self, step: StepRecord) -> None:
        for metric in self._metrics:
            metric.on_step(step)

    def calculate(self, gather: Callable[[Any], list[Any]]) -> dict[str, float]:
        """The values since the last reading, over all ranks. ``gather`` returns the value of each rank. Collective."""
        ranks = gather([(metric.sums(), metric.maxima()) for metric in self._metrics])
        result: dict[str, float] = {}
        for i, metric in enumerate(self._metrics):
            result |= metric.calculate(add_sums(*[rank[i][0] for rank in ranks])) | largest(*[rank[i][1] for rank in ranks])
            metric.reset()
        return result
