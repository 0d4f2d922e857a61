"""Metrics: exact sums over calls and ranks, custom ones, and what the seed's loop reads."""

import pytest
from tiny_models import make_rows

from twinkle_research.errors import ConfigError, DataError, UserError
from twinkle_research.metric import CallRecord, LossMetric, Meter, Metric, StepRecord, TrainMetric
from twinkle_research.metric.base import add_sums
from twinkle_research.model.transformers import TransformersModel


class LongestRow(Metric):
    def __init__(self, unit: str = "tokens"):
        self.unit = unit
        self.reset()

    def reset(self):
        self.lengths = []

    def accumulate(self, call: CallRecord):
        self.lengths += [len(row) for row in call.logps]

    def sums(self):
        return {"rows": (len(self.lengths), 1)}

    def calculate(self, sums):
        return {f"longest/{self.unit}": max(self.lengths), "rows": sums["rows"][0]}


def test_sums_do_not_depend_on_their_order():
    parts = [{"loss": (x, 1)} for x in (1e16, 1.0, -1e16, 1.0)]
    assert add_sums(*parts)["loss"] == add_sums(*reversed(parts))["loss"] == (2.0, 4)
    assert add_sums({"a": (1, 1)}, {"b": (2, 1)}) == {"a": (1, 1), "b": (2, 1)}
    assert add_sums({"a": (float("nan"), 1)}, {"a": (1, 1)})["a"][0] != add_sums({"a": (1, 1)})["a"][0]


def test_meter_over_ranks():
    meter = Meter([LossMetric(), TrainMetric()])
    meter.accumulate(CallRecord(loss_sum=6.0, count=2, num_tokens=2, extra={"nll": (4.0, 2)}, maxima={"gap": 0.5}))
    meter.on_step(StepRecord(grad_norm=3.0, lr=0.1))
    other = [({"loss": (2.0, 2), "nll": (2.0, 2)}, {"gap": 0.25}), ({"tokens": (5, 0)}, {})]
    expected = {"loss": 2.0, "nll": 1.5, "gap": 0.5, "grad_norm": 3.0, "lr": 0.1, "tokens": 7}
    assert meter.calculate(lambda own: [own, other]) == expected
    assert meter.calculate(lambda own: [own]) == {"loss": 0.0, "tokens": 0}


def test_own_metric_and_names(tiny_llama):
    model = TransformersModel(tiny_llama)
    model.add_metric("LossMetric", is_training=True)  # one of a kind: no second
    model.add_metric(LongestRow, is_training=False, unit="ids")
    model.forward_only(make_rows(3))
    result = model.calculate_metric(is_training=False).result
    assert result["longest/ids"] == max(row["length"] for row in make_rows(3)) and result["rows"] == 3 and result["loss"] > 0
    with pytest.raises(ConfigError, match="did you mean 'LossMetric'"):
        model.add_metric("LosMetric")


def test_loss_settings_that_change_the_loss_keep_the_likelihood(tiny_llama):
    rows = make_rows(4)
    model = TransformersModel(tiny_llama)
    model.forward_only(rows)
    plain = model.calculate_metric(is_training=False).result["loss"]
    model.set_loss("CrossEntropyLoss", label_smoothing=0.2, z_loss=0.01)
    model.forward_only(rows)
    result = model.calculate_metric(is_training=False).result
    assert result["nll"] == pytest.approx(plain, rel=1e-6) and result["loss"] != pytest.approx(plain, rel=1e-3)


def test_single_calls_out_of_order_are_named(tiny_llama):
    model = TransformersModel(tiny_llama)
    with pytest.raises(UserError, match="needs a forward before it"):
        model.calculate_loss()
    with pytest.raises(UserError, match="needs a forward and a calculate_loss"):
        model.backward()
    nothing = [row | {"labels": [-100] * row["length"]} for row in make_rows(1)]
    for rows in (make_rows(1), nothing, []):
        model.forward(rows)
        with pytest.raises(UserError, match="needs a forward and a calculate_loss"):
            model.backward()
    model.calculate_loss()  # of no rows, as a rank may have none
    model.backward()
    with pytest.raises(UserError, match="needs a forward before it"):
        model.calculate_loss()
    model.set_loss("GRPOLoss")
    with pytest.raises(DataError, match="advantages has 1 entries for 2 rows"):
        model.forward_backward(make_rows(2), advantages=[1.0])
