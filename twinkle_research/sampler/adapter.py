"""A LoRA in the engine, beside its weights: from tensors in memory, each version under an id of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from twinkle_research.errors import UserError
from twinkle_research.sampler.engine import Engine

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest


class EngineAdapter:
    """The only adapter of an engine. ``request`` is None until one was loaded.

    vLLM ignores new weights under an id that it knows, and its prefix cache goes by the adapter's name: so each version
    has an id and a name that were not used before.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._workers = engine.runner.lora_manager
        self._version = 0
        self.request: LoRARequest | None = None

    def load(self, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
        """Replaces the adapter by ``tensors``, PEFT's names on disk, which are copied. Returns what the engine then has to
        hold of each: B with the scaling in it, in the engine's dtype."""
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper
        from vllm.lora.request import LoRARequest
        from vllm.lora.utils import parse_fine_tuned_lora_name

        peft = PEFTHelper.from_dict(dict(config))
        try:
            peft.validate_legal(self._workers.lora_config)
        except ValueError as error:
            raise UserError(f"vLLM cannot take this adapter: {error}; write sampler.lora=merge") from error
        dtype, manager = self._workers.lora_config.lora_dtype, self._workers._adapter_manager
        mapper = getattr(self._engine.model, "hf_to_vllm_mapper", None)  # vLLM's models have one where their names differ
        mapper = mapper.get_rename_mapper() if mapper is not None else None
        self._version += 1
        with self._engine.model_in_place():
            if self.request is not None:
                self._workers.remove_adapter(self.request.lora_int_id)
            # Clones: vLLM multiplies the scaling into the tensors that it is given.
            copies = {name: tensor.detach().to(dtype, copy=True) for name, tensor in tensors.items()}
            lora = LoRAModel.from_lora_tensors(
                self._version, copies, peft, device=str(self._engine.device), dtype=dtype, weights_mapper=mapper
            )
            scales = {module: layer.scaling for module, layer in lora.loras.items()}
            arriving = {}
            for name, copy in copies.items():
                module, is_a = parse_fine_tuned_lora_name(name, mapper)
                arriving[name] = copy.clone() if is_a else copy * scales[module]
            manager.add_adapter(lora)
            manager.activate_adapter(self._version)
        self.request = LoRARequest(f"version-{self._version}", self._version, "in-memory")
        return arriving

    @staticmethod
    def unscaled(config: Mapping[str, Any]) -> dict[str, Any]:
        """A config whose scaling is 1."""
        return {**config, "lora_alpha": config["r"], "use_rslora": False, "alpha_pattern": {}, "rank_pattern": {}}

    def targets(self) -> dict[str, Tensor]:
        """The matrices that hold the adapter, of all layers that can have one."""
        manager = self._workers._adapter_manager
        slot = manager.lora_index_to_id.index(self.request.lora_int_id)
        found = {}
        for name, module in manager.modules.items():
            for kind in ("lora_a_stacked", "lora_b_stacked"):
                for i, stacked in enumerate(getattr(module, kind)):
                    found[f"{name}.{kind}.{i}"] = stacked[slot, 0]
        return found
