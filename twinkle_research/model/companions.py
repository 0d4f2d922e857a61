"""What algorithms keep beside the policy: a value head and a reference."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from twinkle_research.data_format import InputFeature
from twinkle_research.errors import UserError
from twinkle_research.model.reference import Reference
from twinkle_research.model.value_head import PREFIX, ValueHead

if TYPE_CHECKING:
    from twinkle_research.model.passes import Trained


class _Compute(Protocol):
    def plain_scores(
        self, trained: Trained, inputs: Sequence[InputFeature], weights: AbstractContextManager
    ) -> dict[str, list[list[float]]]:
        """Per row ``logps``, and ``values`` of a value head, at its labels inside the context ``weights``; no gradient, no
        record. Collective."""


class CompanionsMixin:
    """The critic and reference part of the model interface. ``_hidden_size``: width of the states that enter the vocabulary
    projection."""

    if TYPE_CHECKING:
        device: torch.device
        _compute: _Compute

        @property
        def _hidden_size(self) -> int: ...
        def trained(self, adapter_name: str | None = None) -> Trained: ...
        def _set_mode(self, training: bool) -> None: ...
        def _without_lora(self, run: Trained) -> AbstractContextManager[None]: ...

    def add_value_head(self, adapter_name: str | None = None, detach: bool = False) -> None:
        run = self.trained(adapter_name)
        if run.value_head is not None:
            raise UserError("there is a value head already")
        head = ValueHead(self._hidden_size, self.device, detach)
        run.training.add_parameters(self._place(head, run))
        run.value_head = head

    def _place(self, head: ValueHead, run: Trained) -> dict[str, nn.Parameter]:
        """What this process trains of the value head."""
        return head.named()

    def set_reference(self, kind: str, adapter_name: str | None = None) -> None:
        run = self.trained(adapter_name)
        if kind == "base" and not run.name:
            raise UserError("reference 'base' is the model without its adapter, but here all weights are trained; take 'frozen'")
        policy = {name: p for name, p in run.training.parameters.items() if not name.startswith(PREFIX)}
        run.reference = Reference(kind, policy, run.training.layout)

    def refresh_reference(self, rate: float = 1.0, adapter_name: str | None = None) -> None:
        self._reference(self.trained(adapter_name)).refresh(rate)

    def reference_logps(self, inputs: Sequence[InputFeature], adapter_name: str | None = None) -> list[list[float]]:
        run = self.trained(adapter_name)
        reference = self._reference(run)
        self._set_mode(training=False)
        weights = self._without_lora(run) if reference.kind == "base" else reference.in_place()
        return self._compute.plain_scores(run, inputs, weights)["logps"]

    def policy_scores(
        self, inputs: Sequence[InputFeature], adapter_name: str | None = None, dropout: bool = False
    ) -> dict[str, list[list[float]]]:
        run = self.trained(adapter_name)
        self._set_mode(training=dropout)
        return self._compute.plain_scores(run, inputs, nullcontext())

    @staticmethod
    def _reference(run: Trained) -> Reference:
        if run.reference is None:
            raise UserError("no reference: call set_reference first")
        return run.reference
