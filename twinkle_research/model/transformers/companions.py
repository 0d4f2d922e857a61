"""What algorithms keep beside the policy: a value head and a reference."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch import nn

from twinkle_research.data_format import InputFeature
from twinkle_research.errors import UserError
from twinkle_research.model.transformers.reference import Reference
from twinkle_research.model.transformers.value_head import PREFIX, ValueHead

if TYPE_CHECKING:
    from twinkle_research.model.transformers.compute import Compute, Trained


class CompanionsMixin:
    """The critic and reference part of the model interface."""

    if TYPE_CHECKING:
        module: nn.Module
        device: torch.device
        _compute: Compute

        def trained(self, adapter_name: str | None = None) -> Trained: ...
        def _set_mode(self, training: bool) -> None: ...
        def _without_lora(self, run: Trained) -> AbstractContextManager[None]: ...

    def add_value_head(self, adapter_name: str | None = None, detach: bool = False) -> None:
        run = self.trained(adapter_name)
        if run.value_head is not None:
            raise UserError("there is a value head already")
        width = self.module.get_output_embeddings().weight.shape[1]  # of the states that enter the vocabulary projection
        head = ValueHead(width, self.device, detach)
        run.training.add_parameters(head.named())
        run.value_head = head

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
