"""Losses: pure functions of per-token log-probabilities. Importing this package does not import torch."""

from __future__ import annotations

import dataclasses
from enum import Enum
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from twinkle_research.loss.base import Loss

# Short name, which is that of the loss's file -> class. The dataclass XConfig of loss/config.py describes the class XLoss.
LOSSES = {
    "cross_entropy": "CrossEntropyLoss",
    "grpo": "GRPOLoss",
    "dr_grpo": "DRGRPOLoss",
    "dapo": "DAPOLoss",
    "bnpo": "BNPOLoss",
    "gspo": "GSPOLoss",
    "cispo": "CISPOLoss",
    "sapo": "SAPOLoss",
    "ppo": "PPOLoss",
    "ppo_value": "PPOValueLoss",
    "importance_sampling": "ImportanceSamplingLoss",
    "reinforce": "ReinforceLoss",
    "rloo": "RLOOLoss",
    "dpo": "DPOLoss",
    "simpo": "SimPOLoss",
    "orpo": "ORPOLoss",
    "cpo": "CPOLoss",
    "kto_pair": "KTOPairLoss",
}
# Settings of a loss's section that the training loop acts on, not the loss.
OF_THE_LOOP = ("name", "dropout")

__all__ = ["Loss", "build", "build_loss", "resolve_loss", *LOSSES.values()]


def build_loss(cfg: Any) -> Loss:
    """The loss that ``conf/loss/<name>.yaml`` describes: each setting of ``cfg`` is an option of that name; those of a section
    inside it have its name before them (``correction.low`` is ``correction_low``), its ``mode`` is the option of its name."""
    names = [f"{node.__name__.removesuffix('Config')}Loss" for node in type(cfg).__mro__]
    return _class_of(next(name for name in names if name in LOSSES.values()))(**_options_in(cfg))


build = build_loss


def _options_in(cfg: Any) -> dict[str, Any]:
    options = {}
    for field in dataclasses.fields(cfg):
        if field.name in OF_THE_LOOP:
            continue
        value = getattr(cfg, field.name)
        if dataclasses.is_dataclass(value):
            inner = _options_in(value)
            options |= {field.name if name == "mode" else f"{field.name}_{name}": v for name, v in inner.items()}
        else:
            options[field.name] = value.value if isinstance(value, Enum) else value
    return options


def resolve_loss(loss: Any, **options: Any) -> Loss:
    """A Loss from what ``set_loss`` takes: an instance, a class, or the long or short name of a class of this package.

    Raises ConfigError: unknown name or option, with the nearest valid one.
    """
    from twinkle_research.errors import ConfigError, nearest
    from twinkle_research.loss.base import Loss

    if isinstance(loss, str):
        if loss not in LOSSES and loss not in LOSSES.values():
            raise ConfigError(f"unknown loss {loss!r}; {nearest(loss, [*LOSSES, *LOSSES.values()])}")
        loss = _class_of(LOSSES.get(loss, loss))
    if isinstance(loss, Loss):
        if options:
            raise ConfigError(f"options {sorted(options)} have no effect on a loss that is already built")
        return loss
    if not (isinstance(loss, type) and issubclass(loss, Loss)):
        raise ConfigError(f"a loss is a Loss, its class or its name, got {loss!r}")
    known = _known_options(loss)
    for option in options:
        if option not in known:
            raise ConfigError(f"{loss.__name__} has no option {option!r}; {nearest(option, known)}")
    return loss(**options)


def _known_options(loss: type[Loss]) -> list[str]:
    """Names that ``loss(...)`` takes; where it passes ``**options`` on, those of its base too, but for what it decides."""
    import inspect

    names: list[str] = []
    for cls in loss.__mro__:
        if "__init__" not in vars(cls):
            continue
        parameters = [p for name, p in inspect.signature(cls.__init__).parameters.items() if name != "self"]
        names += [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
        if all(p.kind is not p.VAR_KEYWORD for p in parameters):
            break
    return [name for name in dict.fromkeys(names) if name not in loss.decides]


def _class_of(name: str) -> type[Loss]:
    module = next(module for module, cls in LOSSES.items() if cls == name)
    return getattr(import_module(f"twinkle_research.loss.{module}"), name)


def __getattr__(name: str) -> Any:
    if name in LOSSES.values():
        return _class_of(name)
    if name == "Loss":
        from twinkle_research.loss.base import Loss

        return Loss
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
