"""Several adapters on one base model, each trained as if it were alone."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinkle_research.errors import CheckpointError, ConfigError, UserError
from twinkle_research.model.lora_config import check_name, lora_config
from twinkle_research.model.passes import Trained
from twinkle_research.model.saving import SavingMixin
from twinkle_research.model.trained import TrainedModel
from twinkle_research.model.training import TrainingState

if TYPE_CHECKING:
    from peft import LoraConfig

    from twinkle_research.checkpoint.format import CheckpointReader, CheckpointWriter


class SeveralAdapters(SavingMixin, TrainedModel):
    """Stands before a backend's model among the bases of a class. The base's weights never change, and the adapters on it
    share nothing else: each has its own rank and targets, optimizer, schedule, loss, processor, template, metrics and
    accumulation window.

    Calls for different adapters may come in any order. What an adapter becomes is bit for bit what it would become in a
    model of its own: its initial values and dropout masks depend on the seed, not on its name or company.
    """

    @abstractmethod
    def _make(self, adapter_name: str, config: LoraConfig) -> None:
        """Puts a new adapter into the model. Where it is refused nothing has changed."""

    @abstractmethod
    def _release(self, run: Trained) -> None:
        """Takes it out again, and out of ``_runs``."""

    @property
    def adapters(self) -> list[str]:
        return list(self._runs)

    def add_adapter_to_model(self, adapter_name: str, config_or_dir: Any, gradient_accumulation_steps: int = 1) -> None:
        """``config_or_dir``: a peft LoraConfig, our LoraAdapterConfig, or a PEFT folder to start from. Where it is refused
        the model stays as it was."""
        check_name(adapter_name)
        if adapter_name in self._runs:
            raise UserError(f"there is an adapter {adapter_name!r} already; remove_adapter releases it")
        config = lora_config(config_or_dir)
        if config.modules_to_save:
            raise ConfigError("modules_to_save is not supported beside other adapters: it replaces modules that they share")
        self._make(adapter_name, config)
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

    # --- all of them in one checkpoint --------------------------------------------------------------------------

    def save_state(
        self, writer: CheckpointWriter, save_optimizer: bool = True, adapter_name: str | None = None
    ) -> dict[str, Any]:
        """``adapter_name=None``: all adapters, where there are several each in a folder of its own (``adapters/<name>/``,
        ``optimizer/<name>/`` ...)."""
        if adapter_name is not None or len(self._runs) < 2:
            return super().save_state(writer, save_optimizer, adapter_name)
        return {"adapters": {name: self.model_state(name, True).save(writer, save_optimizer) for name in self._runs}}

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
        for load in [self.model_state(name, True).plan(reader, stored[name], load_optimizer) for name in wanted]:
            load()

    def start_training(self, gradient_accumulation_steps: int = 1) -> TrainingState:
        """Raises UserError: only adapters are trained here."""
        raise UserError("the base of several adapters is not trained: add_adapter_to_model, or take a model for one")
