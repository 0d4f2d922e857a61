"""PEFT LoRA adapters as files: what is in one, and the weight that a base weight becomes under it.

Sources: LoRA, Hu et al. 2021 (arXiv:2106.09685) eq. 3; rsLoRA, Kalajdzievski 2023 (arXiv:2312.03732); DoRA, Liu et al.
2024 (arXiv:2402.09353) eq. 5. Names and scaling are those of peft 0.21.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinkle_research.checkpoint.stream import TensorFolder
from twinkle_research.errors import CheckpointError

if TYPE_CHECKING:
    import torch

PREFIX = "base_model.model."
_PARTS = {
    ".lora_A.weight": "a",
    ".lora_B.weight": "b",
    ".lora_embedding_A": "a",
    ".lora_embedding_B": "b",
    ".lora_magnitude_vector": "magnitude",
    ".lora_magnitude_vector.weight": "magnitude",
    ".lora_B.bias": "bias",
}
# Settings whose effect is in the tensors already, or which this module applies. Any other one that is on is refused.
_KNOWN = set(
    "peft_type task_type auto_mapping peft_version base_model_name_or_path revision inference_mode r lora_alpha lora_dropout "
    "target_modules exclude_modules layers_to_transform layers_pattern rank_pattern alpha_pattern use_rslora use_dora "
    "lora_bias bias modules_to_save fan_in_fan_out init_lora_weights ensure_weight_tying megatron_config megatron_core "
    "qalora_group_size loftq_config eva_config runtime_config".split()
)
_PLAIN_INITS = (True, False, None, "gaussian", "eva", "orthogonal")  # the others change the base weights themselves


@dataclass
class LoraParts:
    """Names in the adapter file of the parts of one adapted module."""

    a: str = ""
    b: str = ""
    magnitude: str | None = None
    bias: str | None = None
    is_embedding: bool = False


@dataclass
class Adapter:
    """``modules``: adapted module -> its parts; ``replaced``: parameter -> the tensor that stands in for it (names as
    in the model, without PEFT's prefix)."""

    folder: Path
    config: dict[str, Any]
    tensors: TensorFolder
    modules: dict[str, LoraParts] = field(default_factory=dict)
    replaced: dict[str, str] = field(default_factory=dict)

    def scaling(self, module: str) -> float:
        alphas = self.config.get("alpha_pattern") or {}
        key = next((k for k in alphas if re.match(rf"(.*\.)?({k})$", module)), None)
        alpha = self.config["lora_alpha"] if key is None else alphas[key]
        rank = self.tensors.spec(self.modules[module].a).shape[0]
        return alpha / math.sqrt(rank) if self.config.get("use_rslora") else alpha / rank

    def weight(self, module: str, base: torch.Tensor) -> torch.Tensor:
        """The merged weight of ``module`` from the base's ``weight`` [out, in], in the widest dtype involved, at least
        float32. It is not rounded here."""
        import torch

        parts = self.modules[module]
        if base.ndim != 2 or not base.is_floating_point():
            raise CheckpointError(f"{module}: a weight of shape {list(base.shape)} and type {base.dtype} cannot be merged")
        a, b = self.tensors[parts.a], self.tensors[parts.b]
        dtype = torch.float64 if torch.float64 in (base.dtype, a.dtype, b.dtype) else torch.float32
        delta = (b.to(dtype) @ a.to(dtype)) * self.scaling(module)  # [out, in]; of an embedding [dim, vocab]
        transposed = parts.is_embedding or self._is_transposed(base, delta)
        if (delta.T if transposed else delta).shape != base.shape:
            raise CheckpointError(f"{module}: the adapter is for a weight {list(delta.shape)}, the base has {list(base.shape)}")
        weight = base.to(dtype).T if transposed else base.to(dtype)
        merged = weight + delta
        if parts.magnitude is not None:
            norm = torch.linalg.vector_norm(merged, dim=1)
            merged = (self.tensors[parts.magnitude].to(dtype) / norm)[:, None] * merged
        return merged.T if transposed else merged

    def bias(self, module: str, base: torch.Tensor) -> torch.Tensor:
        """The merged bias of a module whose LoRA B has a bias of its own."""
        import torch

        own = self.tensors[self.modules[module].bias]
        dtype = torch.float64 if torch.float64 in (base.dtype, own.dtype) else torch.float32
        return base.to(dtype) + own.to(dtype) * self.scaling(module)

    def _is_transposed(self, base: torch.Tensor, delta: torch.Tensor) -> bool:
        """GPT-2 keeps [in, out]. The shape tells, but for a square weight."""
        if delta.shape[0] != delta.shape[1]:
            return delta.shape != base.shape
        return bool(self.config.get("fan_in_fan_out"))


def read_adapter(folder: Path, tensors: TensorFolder) -> Adapter:
    """Reads a PEFT folder. Raises CheckpointError naming the setting or tensor that cannot be merged exactly."""
    path = folder / "adapter_config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    _check_config(path, config)
    adapter = Adapter(folder, config, tensors)
    for key in tensors:
        _add(adapter, key)
    for module, parts in adapter.modules.items():
        if not parts.a or not parts.b:
            raise CheckpointError(f"{folder}: module {module} has only one of lora_A and lora_B")
        if bool(parts.magnitude) != bool(config.get("use_dora")):
            raise CheckpointError(f"{folder}: module {module} does not fit use_dora={config.get('use_dora')}")
    return adapter


def _check_config(path: Path, config: Any) -> None:
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise CheckpointError(f"{path}: only LoRA adapters can be merged (peft_type is {config.get('peft_type')!r})")
    for key, value in config.items():
        if key not in _KNOWN and value:
            raise CheckpointError(f"{path}: an adapter with {key}={value!r} cannot be merged here; use peft's merge_and_unload")
    init = config.get("init_lora_weights", True)
    if init not in _PLAIN_INITS:
        raise CheckpointError(
            f"{path}: init_lora_weights={init!r} changed the base weights, so the adapter does not belong to the stored "
            "base; convert it first (peft: path_initial_model_for_weight_conversion)"
        )
    if not isinstance(config.get("lora_alpha"), int | float):
        raise CheckpointError(f"{path}: lora_alpha is missing")


def _add(adapter: Adapter, key: str) -> None:
    name = key.removeprefix(PREFIX)
    suffix = next((s for s in _PARTS if name.endswith(s)), None)
    if name == key or (suffix is None and "lora_" in name):
        raise CheckpointError(f"{adapter.folder}: tensor {key} is of a kind that cannot be merged here")
    if suffix is None:  # modules_to_save, trained biases, a stored base layer
        adapter.replaced[name.replace(".base_layer.", ".")] = key
        return
    parts = adapter.modules.setdefault(name.removesuffix(suffix), LoraParts())
    setattr(parts, _PARTS[suffix], key)
    parts.is_embedding |= "lora_embedding" in suffix
