"""The schedule "default" against Megatron-Core's own OptimizerParamScheduler."""

import math

import pytest
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from twinkle_research.errors import ConfigError
from twinkle_research.model.schedule import build_schedule


class _Groups:
    def __init__(self) -> None:
        self.param_groups = [{"lr": 0.0, "weight_decay": 0.0}]


@pytest.mark.parametrize("style", ["linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 3])
@pytest.mark.parametrize("base_lr", [1e-3, 5e-4])
def test_same_rates(style, warmup, base_lr):
    options = {
        "max_lr": 1e-3, "min_lr": 1e-5, "init_lr": 1e-6, "lr_warmup_steps": warmup, "lr_decay_steps": 10, "lr_decay_style": style,
    }  # fmt: skip
    groups = _Groups()
    theirs = OptimizerParamScheduler(
        groups, **options, start_wd=0.0, end_wd=0.0, wd_incr_steps=0, wd_incr_style="constant"
    )  # it takes step 0 itself
    ours = build_schedule("default", base_lr=base_lr, **options)
    for n in range(14):
        assert base_lr * ours.multiplier(n) == pytest.approx(groups.param_groups[0]["lr"], rel=1e-12), n
        theirs.step(1)


def test_the_call_of_client_code():
    """``set_optimizer('default', lr=1e-4)``, ``set_lr_scheduler('default', lr_decay_steps=1000, max_lr=1e-4)``"""
    schedule = build_schedule("default", base_lr=1e-4, lr_decay_steps=1000, max_lr=1e-4)
    assert [schedule.multiplier(n) for n in (0, 500, 1000, 2000)] == pytest.approx([1.0, 0.5, 0.0, 0.0])
    assert schedule.multiplier(250) == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))
    assert build_schedule("default").multiplier(10**6) == 1.0
    assert build_schedule("OptimizerParamScheduler", base_lr=1e-4, max_lr=2e-4).multiplier(7) == 2.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr_decay_style": "cosin"}, "did you mean 'cosine'"),
        ({"lr_decay_style": "linear"}, "needs lr_decay_steps"),
        ({"lr_decay_style": "constant", "lr_decay_steps": 5}, "no use for lr_decay_steps"),
        ({"min_lr": 1e-5}, "min_lr=1e-05 has no effect"),
        ({"lr_decay_steps": 3, "lr_warmup_steps": 3}, "must be more than lr_warmup_steps=3"),
        ({"lr_decay_step": 3}, "did you mean 'lr_decay_steps'"),
    ],
)
def test_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        build_schedule("default", **options)
