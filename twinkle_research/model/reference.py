"""The policy that a run is kept close to: the model without its adapter, or a copy of what is trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from twinkle_research.errors import ConfigError, UserError, nearest
from twinkle_research.model.gradients import is_low_precision
from twinkle_research.model.layout import Layout

KINDS = ("base", "frozen", "refreshed")


class Reference:
    """``base``: the adapter is switched off. ``frozen``: a copy of the trained tensors as they are now. ``refreshed``: the
    same, but ``refresh`` brings it up to date. A copy is of this rank's parts where ``layout`` shards.
    """

    def __init__(self, kind: str, tensors: Mapping[str, Tensor], layout: Layout) -> None:
        if kind not in KINDS:
            raise ConfigError(f"reference={kind!r}; {nearest(kind, KINDS)}")
        self.kind = kind
        self._present = dict(tensors)
        self._layout = layout
        self.copy: dict[str, Tensor] = {} if kind == "base" else {n: t.detach().clone() for n, t in tensors.items()}
        # Of low-precision copies, once they were moved by less than all of the way: rounding would swallow small moves.
        self._exact: dict[str, Tensor] = {}

    @torch.no_grad()
    def refresh(self, rate: float = 1.0) -> None:
        """Moves the copy to the present weights, by ``rate`` of the way (1: all of it)."""
        if self.kind != "refreshed":
            raise UserError(f"a reference of kind {self.kind!r} cannot be refreshed; set_reference('refreshed')")
        if not 0.0 < rate <= 1.0:
            raise ConfigError(f"rate must be in (0, 1], got {rate}")
        if rate == 1.0:
            self._exact.clear()
            for name, tensor in self.copy.items():
                tensor.copy_(self._present[name])
            return
        for name, tensor in self.copy.items():
            if is_low_precision(tensor) and name not in self._exact:
                self._exact[name] = tensor.float()
            exact = self._exact.get(name, tensor)
            exact.lerp_(self._present[name].to(exact.dtype), rate)
            tensor.copy_(exact)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """While it is open the model has the weights of the copy; afterwards its own again, bit for bit."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        self._layout.release()
        for name, tensor in self.copy.items():
            present = self._present[name].data  # a graph that is open does not see the change, which does not last
            held = present.clone()
            present.copy_(tensor)
            tensor.copy_(held)

    def stored(self) -> dict[str, Tensor]:
        """What a checkpoint holds of it."""
        return self.copy | self._exact

    def load(self, name: str, stored: Tensor) -> None:
        """Puts one tensor of ``stored`` back."""
        copy = self.copy[name]
        if is_low_precision(copy) and not is_low_precision(stored):
            self._exact[name] = stored.to(copy.device, torch.float32, copy=True)
        copy.copy_(stored)
