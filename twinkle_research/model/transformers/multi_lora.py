"""Several adapters on one base model, each trained as if it were alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinkle_research.errors import CheckpointError, ConfigError, UserError
from twinkle_research.model.training import TrainingState
from twinkle_research.model.transformers import lora
from twinkle_research.model.transformers.compute import Trained
from twinkle_research.model.transformers.model import TransformersModel
from twinkle_research.model.transformers.state import ModelState

if TYPE_CHECKING:
    from twinkle_research.checkpoint.format import CheckpointReader, CheckpointWriter


class MultiLoraTransformersModel(TransformersModel):
    """A base model whose weights never change, and adapters on it that share nothing else: each has its own rank and
    targets, optimizer, schedule, loss, processor, template, metrics and accumulation window.

    Calls for different adapters may come in any order. What an adapter becomes is bit for bit what it would become in a
    TransformersModel of its own: its initial values and dropout masks depend on the seed, not on its name or company.
    """

    def __init__(self, model_id: str | Path, **options: Any) -> None:
        super().__init__(model_id, **options)
        self._runs.clear()
        self._active: str | None = None
        self._shard(trained=False)

    @property
    def adapters(self) -> list[str]:
        return list(self._runs)

    def add_adapter_to_model(self, adapter_name: str, config_or_dir: Any, gradient_accumulation_steps: int = 1) -> None:
        """``config_or_dir``: a peft LoraConfig, our LoraAdapterConfig, or a PEFT folder to start from. Where it is refused
        the model stays as it was."""
        lora.check_name(adapter_name)
        if adapter_name in self._runs:
            raise UserError(f"there is an adapter {adapter_name!r} already; remove_adapter releases it")
        config = lora.lora_config(config_or_dir)
        if config.modules_to_save:
            raise ConfigError("modules_to_save is not supported beside other adapters: it replaces modules that they share")
        self._inject(config, adapter_name)
        self._active = adapter_name
        run = self._runs[adapter_name] = Trained(adapter_name)
        try:
            self._begin(run, gradient_accumulation_steps)
            if isinstance(config_or_dir, (str, Path)):
                self.load_adapter_weights(config_or_dir, adapter_name)
        except BaseException:
            self._release(run)
            raise

    def remove_adapter(self, adapter_name: str) -> None:
        """Releases the adapter with its optimizer, gradients and window. Its name may then be used again."""
        run = self.trained(adapter_name)
        run.training.gradients.close()
        self._release(run)

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

    # --- all of them in one checkpoint --------------------------------------------------------------------------

    def save_state(
        self, writer: CheckpointWriter, save_optimizer: bool = True, adapter_name: str | None = None
    ) -> dict[str, Any]:
        """``adapter_name=None``: all adapters, where there are several each in a folder of its own (``adapters/<name>/``,
        ``optimizer/<name>/`` ...)."""
        if adapter_name is not None or len(self._runs) < 2:
            return super().save_state(writer, save_optimizer, adapter_name)
        return {"adapters": {name: ModelState(self, name, True).save(writer, save_optimizer) for name in self._runs}}

    def load_state(
        self,
        reader: CheckpointReader,
        state: dict[str, Any] | None,
        load_optimizer: bool = True,
        adapter_name: str | None = None,
    ) -> None:
        """``adapter_name``: only this one, from a checkpoint of itself or of several."""
        stored = (state or {}).get("adapters")
        if stored is None:
            super().load_state(reader, state, load_optimizer, adapter_name)
            return
        wanted = [adapter_name] if adapter_name else self.adapters
        if not set(wanted) <= set(stored) or (adapter_name is None and set(wanted) != set(stored)):
            raise CheckpointError(f"{reader.path} holds the adapters {', '.join(stored)}, but this run has {', '.join(wanted)}")
        for load in [ModelState(self, name, True).plan(reader, stored[name], load_optimizer) for name in wanted]:
            load()

    def start_training(self, gradient_accumulation_steps: int = 1) -> TrainingState:
        """Raises UserError: only adapters are trained here."""
        raise UserError("the base of several adapters is not trained: add_adapter_to_model, or take a TransformersModel")

    def _activate(self, run: Trained) -> None:
        if self._active != run.name:
            self.module.set_adapter(run.name)
            self._active = run.name
