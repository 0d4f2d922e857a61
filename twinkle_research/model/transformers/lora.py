"""LoRA by PEFT on a model of transformers: keyed initial values, names on disk, effective weights."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from twinkle_research.model.lora_config import initial_a, inject
from twinkle_research.randomness import derive_seed

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel
    from transformers import PreTrainedModel


def add_lora(model: PreTrainedModel | PeftModel, config: LoraConfig, name: str, seed: int) -> PeftModel:
    """Injects LoRA layers into ``model``, beside those that it may have; A is drawn by key, B is 0, so the function does not
    change yet."""
    peft_model = inject(model, config, name)
    init_lora(peft_model, name, seed)
    return peft_model


@torch.no_grad()
def init_lora(peft_model: PeftModel, adapter: str, seed: int) -> None:
    """PEFT's initial distributions, drawn by parameter name: those of ``initial_a`` for A, B zero; for an embedding A zero
    and B standard normal."""
    own = re.compile(rf"\.(lora_A|lora_B|lora_embedding_A|lora_embedding_B)\.{re.escape(adapter)}(\.weight)?$")
    for name, parameter in peft_model.named_parameters():
        found = own.search(name)
        kind = found and found[1]
        on_disk = disk_name(name, adapter)
        if kind in ("lora_B", "lora_embedding_A"):
            parameter.zero_()
        elif kind == "lora_A":
            parameter.copy_(initial_a(seed, on_disk, parameter.shape))
        elif kind is not None:
            generator = torch.Generator().manual_seed(derive_seed(seed, "init", on_disk))
            parameter.copy_(torch.randn(parameter.shape, generator=generator))


# --- names --------------------------------------------------------------------------------------------------------------


def disk_name(name: str, adapter: str) -> str:
    """PEFT's name on disk of a parameter of the PeftModel: without the adapter's name and wrappers."""
    key = re.escape(adapter)
    name = re.sub(rf"\.modules_to_save\.{key}\.", ".", name)
    name = re.sub(rf"\.lora_dropout\.{key}$", ".lora_dropout", name)
    name = re.sub(rf"\.lora_magnitude_vector\.{key}\.weight$", ".lora_magnitude_vector", name)
    return re.sub(rf"\.(lora_[A-Za-z_]+)\.{key}(\.weight)?$", r".\1\2", name)


def adapter_parameters(peft_model: PeftModel, adapter: str) -> dict[str, nn.Parameter]:
    """Name on disk -> trained parameter of the active adapter, each once."""
    return {disk_name(name, adapter): p for name, p in peft_model.named_parameters() if p.requires_grad}


def tied_names(peft_model: PeftModel, adapter: str) -> dict[str, str]:
    """Further names on disk of trained parameters that have several -> the name that stands in ``adapter_parameters``."""
    first: dict[int, str] = {}
    aliases = {}
    for name, parameter in peft_model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            on_disk = disk_name(name, adapter)
            if first.setdefault(id(parameter), on_disk) != on_disk:
                aliases[on_disk] = first[id(parameter)]
    return aliases


# --- the output projection and merged weights ---------------------------------------------------------------------------


def head_terms(head: nn.Module, hidden_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """(hidden, weight, bias) whose product is what the output projection computes, with the adapter it may carry.

    LoRA on the projection is exact as one wider product: [h, s A h] [W, B]^T.
    """
    if isinstance(head, nn.Linear):
        return hidden_BTD, head.weight, head.bias
    from peft.utils.other import ModulesToSaveWrapper

    if isinstance(head, ModulesToSaveWrapper):
        active = head.original_module if head.disable_adapters else head.modules_to_save[head.active_adapter]
        return hidden_BTD, active.weight, active.bias
    base = head.get_base_layer()
    (adapter,) = head.active_adapters
    if head.disable_adapters or adapter not in head.lora_A:  # another adapter may be here
        return hidden_BTD, base.weight, base.bias
    a, b = head.lora_A[adapter], head.lora_B[adapter]
    low = a(head.lora_dropout[adapter](hidden_BTD.to(a.weight.dtype))) * head.scaling[adapter]
    hidden = torch.cat([hidden_BTD, low.to(hidden_BTD.dtype)], dim=-1)
    return hidden, torch.cat([base.weight, b.weight.to(base.weight.dtype)], dim=1), base.bias


def merged_weights(peft_model: PeftModel, adapter: str) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, weight) of the base model with the adapter merged in float32, each rounded once to its dtype."""
    from peft.tuners.lora import LoraLayer

    base = peft_model.get_base_model()
    layers = {f"{name}.base_layer.weight": m for name, m in base.named_modules() if isinstance(m, LoraLayer) and adapter in m.r}
    for clean, name, parameter in _effective_parameters(base, adapter):
        yield clean, _merge(layers[name], adapter) if name in layers else whole(parameter.detach())


def merged_shapes(peft_model: PeftModel, adapter: str) -> dict[str, torch.Size]:
    """Of ``merged_weights``."""
    return {clean: parameter.shape for clean, _, parameter in _effective_parameters(peft_model.get_base_model(), adapter)}


def _effective_parameters(base: nn.Module, adapter: str) -> Iterator[tuple[str, str, nn.Parameter]]:
    """(name without the adapter's wrappers, name, parameter) of what the adapter leaves in use or replaces."""
    for name, parameter in base.named_parameters():
        if ".lora_" not in name and ".original_module." not in name:
            yield re.sub(rf"\.modules_to_save\.{re.escape(adapter)}\.", ".", name).replace(".base_layer.", "."), name, parameter


def whole(tensor: Tensor) -> Tensor:
    """A weight of a sharded model, put together; any other as it is. Collective."""
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def _merge(layer: Any, adapter: str) -> Tensor:
    base = whole(layer.get_base_layer().weight)
    merged = layer.get_delta_weight(adapter).to(torch.promote_types(base.dtype, torch.float32)).add_(base)
    if layer.use_dora[adapter]:
        dims = 0 if layer.fan_in_fan_out else 1
        magnitude = layer.lora_magnitude_vector[adapter].weight.to(merged.dtype)
        norm = torch.linalg.vector_norm(merged, dim=dims)
        merged = merged * (magnitude / norm).unsqueeze(dims)
    return merged.to(base.dtype)
