"""The state a module samples in: eval mode, and the adapter that is asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from twinkle_research.errors import UserError, nearest


@contextlib.contextmanager
def sampling_mode(module: nn.Module, adapter_name: str | None, use_base_model: bool) -> Iterator[None]:
    """Eval mode and the wanted adapter; afterwards everything is as it was."""
    training = [m for m in module.modules() if m.training]
    module.eval()
    try:
        with _adapter(module, adapter_name, use_base_model):
            yield
    finally:
        for m in training:
            m.training = True


@contextlib.contextmanager
def _adapter(module: nn.Module, adapter_name: str | None, use_base_model: bool) -> Iterator[None]:
    if not adapter_name and not use_base_model:
        yield
        return
    from peft import PeftModel

    if not isinstance(module, PeftModel):
        if not adapter_name:
            yield  # the base model is all there is
            return
        raise UserError(f"adapter {adapter_name!r}: the model has no adapters")
    if adapter_name and adapter_name not in module.peft_config:
        raise UserError(f"adapter {adapter_name!r} is unknown; {nearest(adapter_name, module.peft_config)}")
    active, trainable = module.active_adapter, [p for p in module.parameters() if p.requires_grad]
    try:
        if use_base_model:
            with module.disable_adapter():
                yield
        else:
            module.set_adapter(adapter_name)
            yield
    finally:
        module.set_adapter(active)
        module.requires_grad_(False)  # switching adapters changes what is trainable
        for parameter in trainable:
            parameter.requires_grad_(True)
