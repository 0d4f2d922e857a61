"""Learning-rate schedules: pure functions from the number of optimizer steps done to a multiplier of the peak rate.

Update number n (from 0) uses ``multiplier(n)``. Being functions of the position alone they need no state beyond it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, is_dataclass
from inspect import signature
from typing import Any

from twinkle_research.errors import ConfigError, nearest

Multiplier = Callable[[int], float]


@dataclass(frozen=True)
class Schedule:
    name: str
    multiplier: Multiplier
    options: dict[str, Any] = field(default_factory=dict)

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, **self.options}


def constant(warmup_steps: int = 0) -> Multiplier:
    """Linear warmup from 0, then 1."""
    return lambda n: _warmup(n, warmup_steps)


def linear(total_steps: int, warmup_steps: int = 0, min_ratio: float = 0.0) -> Multiplier:
    """Linear warmup from 0, then a straight line to ``min_ratio`` at ``total_steps``."""
    _check_span("linear", warmup_steps, total_steps, min_ratio)
    return lambda n: _warmup(n, warmup_steps) * (1 - (1 - min_ratio) * _progress(n, warmup_steps, total_steps))


def cosine(total_steps: int, warmup_steps: int = 0, min_ratio: float = 0.0) -> Multiplier:
    """Linear warmup from 0, then half a cosine to ``min_ratio`` at ``total_steps`` (Loshchilov & Hutter 2016, eq. 5)."""
    _check_span("cosine", warmup_steps, total_steps, min_ratio)

    def at(n: int) -> float:
        half = 0.5 * (1 + math.cos(math.pi * _progress(n, warmup_steps, total_steps)))
        return _warmup(n, warmup_steps) * (min_ratio + (1 - min_ratio) * half)

    return at


def wsd(total_steps: int, decay_steps: int, warmup_steps: int = 0, min_ratio: float = 0.0) -> Multiplier:
    """Warmup, stable, then a straight line to ``min_ratio`` over the last ``decay_steps`` (arXiv:2404.06395)."""
    _check_span("wsd", warmup_steps, total_steps, min_ratio)
    if not 0 < decay_steps <= total_steps - warmup_steps:
        raise ConfigError(
            f"scheduler.decay_steps={decay_steps} must lie between 1 and {total_steps - warmup_steps}: "
            f"{total_steps} steps in all, {warmup_steps} of them warmup"
        )
    start = total_steps - decay_steps
    return lambda n: _warmup(n, warmup_steps) * (1 - (1 - min_ratio) * _progress(n, start, total_steps))


def constant_lr(factor: float = 1 / 3, total_iters: int = 5) -> Multiplier:
    """torch's ConstantLR: ``factor`` for the first ``total_iters`` updates, then 1."""
    return lambda n: factor if n < total_iters else 1.0


def linear_lr(start_factor: float = 1 / 3, end_factor: float = 1.0, total_iters: int = 5) -> Multiplier:
    """torch's LinearLR: from ``start_factor`` to ``end_factor`` over ``total_iters`` updates."""
    if total_iters < 1:
        raise ConfigError(f"schedule LinearLR: total_iters must be >= 1, got {total_iters}")
    return lambda n: start_factor + (end_factor - start_factor) * min(n, total_iters) / total_iters


def cosine_annealing_lr(T_max: int, eta_min: float = 0.0, base_lr: float = 1.0) -> Multiplier:
    """torch's CosineAnnealingLR. ``eta_min`` is a learning rate, not a ratio: a share of ``base_lr``, the optimizer's."""
    if T_max < 1:
        raise ConfigError(f"schedule CosineAnnealingLR: T_max must be >= 1, got {T_max}")
    if not base_lr:
        if eta_min:
            raise ConfigError(f"schedule CosineAnnealingLR cannot end at eta_min={eta_min}: the optimizer's lr is 0")
        return lambda n: 1.0
    floor = eta_min / base_lr
    return lambda n: floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * n / T_max))


def cosine_warmup(num_warmup_steps: int, num_training_steps: int, num_cycles: float = 0.5) -> Multiplier:
    """transformers' get_cosine_schedule_with_warmup."""

    def at(n: int) -> float:
        progress = (n - num_warmup_steps) / max(1, num_training_steps - num_warmup_steps)
        decay = max(0.0, 0.5 * (1 + math.cos(2 * math.pi * num_cycles * progress)))
        return _warmup(n, num_warmup_steps) if n < num_warmup_steps else decay

    return at


def linear_warmup(num_warmup_steps: int, num_training_steps: int) -> Multiplier:
    """transformers' get_linear_schedule_with_warmup."""
    return linear(num_training_steps, num_warmup_steps)


_MEGATRON_STYLES: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
}


def megatron(
    lr_decay_steps: int | None = None,
    max_lr: float | None = None,
    min_lr: float = 0.0,
    init_lr: float = 0.0,
    lr_warmup_steps: int = 0,
    lr_decay_style: str | None = None,
    base_lr: float = 1.0,
) -> Multiplier:
    """Megatron-Core's OptimizerParamScheduler: linear warmup from ``init_lr`` to ``max_lr`` (the optimizer's by default), then
    down to ``min_lr``, which it has from update ``lr_decay_steps`` on. Without ``lr_decay_steps`` it stays at ``max_lr``."""
    style = lr_decay_style or ("constant" if lr_decay_steps is None else "cosine")
    if style not in _MEGATRON_STYLES:
        raise ConfigError(f"lr_decay_style={style!r}; {nearest(style, _MEGATRON_STYLES)}")
    if (style == "constant") != (lr_decay_steps is None):
        raise ConfigError(f"lr_decay_style={style} {'has no use for' if lr_decay_steps else 'needs'} lr_decay_steps")
    if min_lr and style == "constant":
        raise ConfigError(f"min_lr={min_lr} has no effect without lr_decay_steps")
    if lr_decay_steps is not None and lr_decay_steps <= lr_warmup_steps:
        raise ConfigError(f"lr_decay_steps={lr_decay_steps} must be more than lr_warmup_steps={lr_warmup_steps}")
    if not base_lr:
        return lambda n: 1.0
    peak = base_lr if max_lr is None else max_lr

    def at(n: int) -> float:
        if n <= lr_warmup_steps and lr_warmup_steps:
            return (init_lr + (peak - init_lr) * n / lr_warmup_steps) / base_lr
        if lr_decay_steps is None:
            return peak / base_lr
        return (min_lr + (peak - min_lr) * _MEGATRON_STYLES[style](_progress(n, lr_warmup_steps, lr_decay_steps))) / base_lr

    return at


SCHEDULES: dict[str, Callable[..., Multiplier]] = {
    "constant": constant, "linear": linear, "cosine": cosine, "wsd": wsd,
    "default": megatron, "OptimizerParamScheduler": megatron, "ConstantLR": constant_lr, "LinearLR": linear_lr,
    "CosineAnnealingLR": cosine_annealing_lr,
    "CosineWarmupScheduler": cosine_warmup, "LinearWarmupScheduler": linear_warmup,
}  # fmt: skip


def build_schedule(schedule: Any, *, total_steps: int | None = None, base_lr: float = 1.0, **options: Any) -> Schedule:
    """A Schedule from a scheduler config, a name of SCHEDULES (as itself or as a class of that name) or a function.

    ``total_steps``: the run's last step, used where the schedule needs an end and its own ``total_steps`` is null.
    Raises ConfigError for an unknown name or option, a missing end or impossible lengths.
    """
    ready = isinstance(schedule, Schedule) or is_dataclass(schedule)
    if options and (ready or (callable(schedule) and not isinstance(schedule, type))):
        raise ConfigError(f"options {', '.join(options)} would have no effect on a schedule that is ready")
    if isinstance(schedule, Schedule):
        return schedule
    if not isinstance(schedule, str) and not callable(schedule) and not is_dataclass(schedule):
        raise ConfigError(f"a schedule is a name of SCHEDULES or a function of the step, got {type(schedule).__name__}")
    if is_dataclass(schedule):
        options = {key: value for key, value in asdict(schedule).items() if value is not None and key != "name"}
        schedule = schedule.name
    name = schedule if isinstance(schedule, str) else schedule.__name__
    if name not in SCHEDULES:
        if callable(schedule) and not isinstance(schedule, type):
            return Schedule(name, schedule)
        raise ConfigError(f"unknown schedule {name!r}; {nearest(name, SCHEDULES)}")
    known = signature(SCHEDULES[name]).parameters
    for option in options:
        if option not in known:
            raise ConfigError(f"schedule {name} has no option {option!r}; {nearest(option, known)}")
    for option, value in (("total_steps", total_steps), ("base_lr", base_lr)):
        if option in known and value is not None:
            options.setdefault(option, value)
    missing = [option for option, p in known.items() if p.default is p.empty and option not in options]
    if missing:
        raise ConfigError(f"schedule {name} needs {missing[0]}")
    return Schedule(name, SCHEDULES[name](**options), options)


def _warmup(n: int, warmup_steps: int) -> float:
    return n / warmup_steps if n < warmup_steps else 1.0


def _progress(n: int, start: int, end: int) -> float:
    return min(max((n - start) / (end - start), 0.0), 1.0)


def _check_span(name: str, warmup_steps: int, total_steps: int, min_ratio: float) -> None:
    if total_steps <= warmup_steps:
        raise ConfigError(
            f"scheduler={name}: the decay must end after the warmup, but total_steps is {total_steps} and "
            f"scheduler.warmup_steps {warmup_steps}; give a shorter warmup"
        )
    if not 0.0 <= min_ratio <= 1.0:
        raise ConfigError(f"scheduler.min_ratio must be in [0, 1], got {min_ratio}")
