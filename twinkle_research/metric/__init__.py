"""Metrics that ``model.add_metric`` takes. Importing this package does not import torch."""

from twinkle_research.metric.base import CallRecord, LossMetric, Metric, StepRecord, TrainMetric
from twinkle_research.metric.meter import Meter

__all__ = ["CallRecord", "LossMetric", "Meter", "Metric", "StepRecord", "TrainMetric"]
