"""Schedules as functions of the position, against S21 and against torch's and transformers' own."""

import math

import pytest
import torch

from twinkle_research.distributed.runtime import Runtime
from twinkle_research.errors import ConfigError
from twinkle_research.model.optimizer import optimizer_spec
from twinkle_research.model.schedule import build_schedule
from twinkle_research.model.training import TrainingState
from twinkle_research.trainer.config import ConstantScheduleConfig, DecayScheduleConfig, WsdScheduleConfig


def values(schedule, n):
    return [schedule.multiplier(i) for i in range(n)]


def test_s21_linear_with_warmup():
    schedule = build_schedule(DecayScheduleConfig(name="linear", warmup_steps=4), total_steps=10)
    expected = [0, 0.25, 0.5, 0.75, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]
    assert values(schedule, 10) == pytest.approx(expected, abs=1e-15)
    assert 1e-3 * schedule.multiplier(5) == pytest.approx(8.3333e-4, abs=1e-8)  # after 5 updates, however they were reached
    assert schedule.multiplier(10) == schedule.multiplier(99) == 0.0


def test_shapes():
    assert values(build_schedule(ConstantScheduleConfig()), 3) == [1, 1, 1]
    assert values(build_schedule(ConstantScheduleConfig(warmup_steps=2)), 4) == [0, 0.5, 1, 1]
    wsd = build_schedule(WsdScheduleConfig(warmup_steps=2, decay_steps=4, min_ratio=0.2), total_steps=10)
    assert values(wsd, 12) == pytest.approx([0, 0.5, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2])
    cosine = build_schedule(DecayScheduleConfig(name="cosine", min_ratio=0.1), total_steps=8)
    assert values(cosine, 9) == pytest.approx([0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * n / 8)) for n in range(9)])
    assert build_schedule(DecayScheduleConfig(name="linear", total_steps=4), total_steps=100).multiplier(2) == 0.5


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("LinearLR", {}),
        ("LinearLR", {"start_factor": 0.5, "end_factor": 0.1, "total_iters": 7}),
        ("ConstantLR", {"factor": 0.25, "total_iters": 3}),
        ("CosineAnnealingLR", {"T_max": 6, "eta_min": 0.01}),
    ],
)
def test_torch_names_mean_what_torch_does(name, options):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    reference = getattr(torch.optim.lr_scheduler, name)(optimizer, **options)
    ours = build_schedule(getattr(torch.optim.lr_scheduler, name), base_lr=0.1, **options)
    for n in range(10):
        assert 0.1 * ours.multiplier(n) == pytest.approx(reference.get_last_lr()[0], rel=1e-9), n
        optimizer.step()
        reference.step()


def test_transformers_names():
    from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

    pairs = {"CosineWarmupScheduler": get_cosine_schedule_with_warmup, "LinearWarmupScheduler": get_linear_schedule_with_warmup}
    for name, make in pairs.items():
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        reference = make(optimizer, 3, 9)
        ours = build_schedule(name, num_warmup_steps=3, num_training_steps=9)
        for n in range(11):
            assert ours.multiplier(n) == pytest.approx(reference.get_last_lr()[0], abs=1e-12)
            optimizer.step()
            reference.step()


def test_a_function_is_a_schedule():
    assert values(build_schedule(lambda n: n + 1.0), 3) == [1, 2, 3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"schedule": "cosin"}, "did you mean 'cosine'"),
        ({"schedule": "linear"}, "needs total_steps"),
        ({"schedule": "linear", "total_steps": 5, "warmup_stepz": 1}, "did you mean 'warmup_steps'"),
        ({"schedule": "linear", "total_steps": 5, "warmup_steps": 5}, "shorter warmup"),
        ({"schedule": "cosine", "total_steps": 5, "min_ratio": 1.5}, "min_ratio"),
        ({"schedule": "wsd", "total_steps": 5, "decay_steps": 6}, "decay_steps=6"),
        ({"schedule": "CosineAnnealingLR", "T_max": 0}, "T_max must be >= 1"),
        ({"schedule": "CosineAnnealingLR", "T_max": 5, "eta_min": 0.1, "base_lr": 0.0}, "optimizer's lr is 0"),
        ({"schedule": "LinearLR", "total_iters": 0}, "total_iters must be >= 1"),
    ],
)
def test_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        build_schedule(**arguments)


@pytest.mark.parametrize("order", ["optimizer first", "schedule first", "another optimizer later"])
def test_eta_min_is_that_rate_whatever_is_set_first(order):
    state = TrainingState({"w": torch.nn.Parameter(torch.zeros(1))}, Runtime())

    def optimizer(lr):
        state.set_optimizer(optimizer_spec("sgd", lr=lr))

    if order == "another optimizer later":
        optimizer(0.5)
    if order == "optimizer first":
        optimizer(1e-3)
    state.set_schedule("CosineAnnealingLR", T_max=10, eta_min=1e-5)
    if order != "optimizer first":
        optimizer(1e-3)
    rates = []
    for state.schedule_position in (0, 5, 10):
        rates.append(state.lr)
    assert rates == pytest.approx([1e-3, 5.05e-4, 1e-5])
    with pytest.raises(ConfigError, match="optimizer's lr is 0"):
        optimizer(0.0)
    with pytest.raises(ConfigError, match="no option 'base_lr'"):
        state.set_schedule("CosineAnnealingLR", T_max=10, base_lr=1.0)
    assert state.lr == pytest.approx(1e-5)


def test_describe_is_plain():
    assert build_schedule("linear", total_steps=4).describe() == {"name": "linear", "total_steps": 4}
