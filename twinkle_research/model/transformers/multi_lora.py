"""Several adapters on one base model, each trained as if it were alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinkle_research.model.passes import Trained
from twinkle_research.model.several import SeveralAdapters
from twinkle_research.model.transformers.model import TransformersModel

if TYPE_CHECKING:
    from peft import LoraConfig


class MultiLoraTransformersModel(SeveralAdapters, TransformersModel):
    """Several LoRAs on one TransformersModel."""

    def __init__(self, model_id: str | Path, **options: Any) -> None:
        super().__init__(model_id, **options)
        self._runs.clear()
        self._active: str | None = None
        self._shard(trained=False)

    def _make(self, adapter_name: str, config: LoraConfig) -> None:
        self._inject(config, adapter_name)
        self._active = adapter_name

    def _release(self, run: Trained) -> None:
        del self._runs[run.name]
        self._active = None
        if self._runs:
            self._activate(next(iter(self._runs.values())))  # PEFT cannot delete the active one without a word
            self.module.delete_adapter(run.name)
        else:
            # PEFT hooked into the embeddings when the first one came.
            self.module.get_base_model().disable_input_require_grads()
            self.module = self._compute.scorer.module = self.module.unload()

    def _activate(self, run: Trained) -> None:
        if self._active != run.name:
            self.module.set_adapter(run.name)
            self._active = run.name
