"""Losses: pure functions of per-token log-probabilities. Importing this package does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from twinkle_research.loss.base import Loss
    from twinkle_research.loss.config import CrossEntropyConfig

__all__ = ["CrossEntropyLoss", "Loss", "build", "build_loss", "resolve_loss"]


def build_loss(cfg: CrossEntropyConfig) -> Loss:
    """The loss that ``conf/loss/<name>.yaml`` describes."""
    from twinkle_research.loss.cross_entropy import CrossEntropyLoss

    return CrossEntropyLoss(cfg.normalization.value, cfg.label_smoothing, cfg.z_loss)


build = build_loss


def resolve_loss(loss: Any, **options: Any) -> Loss:
    """A Loss from what ``set_loss`` takes: an instance, a class, or the name of a class of this package.

    ValueError: unknown name or option, with the nearest valid one.
    """
    import inspect

    from twinkle_research.errors import nearest
    from twinkle_research.loss.base import Loss
    from twinkle_research.loss.cross_entropy import CrossEntropyLoss

    names = {"CrossEntropyLoss": CrossEntropyLoss, "cross_entropy": CrossEntropyLoss}
    if isinstance(loss, str):
        if loss not in names:
            raise ValueError(f"unknown loss {loss!r}; {nearest(loss, names)}")
        loss = names[loss]
    if isinstance(loss, Loss):
        if options:
            raise ValueError(f"options {sorted(options)} have no effect on a loss that is already built")
        return loss
    known = [name for name in inspect.signature(loss.__init__).parameters if name != "self"]
    for option in options:
        if option not in known:
            raise ValueError(f"{loss.__name__} has no option {option!r}; {nearest(option, known)}")
    return loss(**options)


def __getattr__(name: str) -> Any:
    if name == "CrossEntropyLoss":
        from twinkle_research.loss.cross_entropy import CrossEntropyLoss

        return CrossEntropyLoss
    if name == "Loss":
        from twinkle_research.loss.base import Loss

        return Loss
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
