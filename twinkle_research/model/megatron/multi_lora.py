"""Several adapters on one MegatronModel."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinkle_research.model.megatron.model import MegatronModel
from twinkle_research.model.passes import Trained
from twinkle_research.model.several import SeveralAdapters

if TYPE_CHECKING:
    from peft import LoraConfig


class MultiLoraMegatronModel(SeveralAdapters, MegatronModel):
    """Several LoRAs on one MegatronModel."""

    def __init__(self, model_id: str | Path, **options: Any) -> None:
        super().__init__(model_id, **options)
        self._runs.clear()

    def _make(self, adapter_name: str, config: LoraConfig) -> None:
        self._adapters.add(adapter_name, config)

    def _release(self, run: Trained) -> None:
        del self._runs[run.name]
        self._adapters.remove(run.name)
