"""Saving and loading of a model: into the trainer's checkpoints, and into folders of the caller's choice."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from twinkle_research.checkpoint.format import CheckpointReader, CheckpointWriter, TensorFolder, safe_name
from twinkle_research.model.base import SaveResponse

if TYPE_CHECKING:
    from twinkle_research.distributed.runtime import Runtime
    from twinkle_research.model.state import ModelState
    from twinkle_research.model.training import TrainingState

TRAINER_STATE = "trainer_state.json"


class SavingMixin:
    """The state part of the model interface. ``dir`` arguments accept a path or what ``save`` returned."""

    if TYPE_CHECKING:
        runtime: Runtime
        backend: str
        layout: dict[str, Any]

        def training_state(self, adapter_name: str | None = None) -> TrainingState: ...
        def model_state(self, adapter_name: str | None = None, among_others: bool = False) -> ModelState: ...

    def save_state(
        self, writer: CheckpointWriter, save_optimizer: bool = True, adapter_name: str | None = None
    ) -> dict[str, Any]:
        return self.model_state(adapter_name).save(writer, save_optimizer)

    def load_state(
        self,
        reader: CheckpointReader,
        state: dict[str, Any] | None,
        load_optimizer: bool = True,
        adapter_name: str | None = None,
    ) -> None:
        self.model_state(adapter_name).load(reader, state, load_optimizer)

    def load_adapter_weights(self, folder: str | Path, adapter_name: str | None = None) -> None:
        """Weights of a PEFT folder, into the adapter that was added from its config."""
        self.model_state(adapter_name).load_weights(TensorFolder(folder, "adapter_model", follow_links=True))

    def get_state_dict(self, adapter_name: str | None = None) -> dict[str, Tensor]:
        """Copies of the trainable tensors, whole, under the names that they have on disk. Collective."""
        return {name: tensor.clone() for name, tensor in self.model_state(adapter_name).trained_tensors()}

    def save(
        self,
        name: str | None = None,
        output_dir: str = "output",
        save_optimizer: bool = False,
        consumed_train_samples: int = 0,
        adapter_name: str | None = None,
    ) -> SaveResponse:
        """Writes the checkpoint ``output_dir/name`` (``checkpoint-step-N`` without a name). Collective.

        An open accumulation window is kept: it goes on here, and is part of what ``save_optimizer`` saves.
        """
        step = self.training_state(adapter_name).cur_step
        writer = CheckpointWriter(
            output_dir,
            f"checkpoint-step-{step}" if name is None else name,
            step=step,
            backend=self.backend,
            layout=self.layout,
            is_writer=self.runtime.is_main,
        )
        with writer:
            state = self.save_state(writer, save_optimizer, adapter_name)
            progress = {"step": step, "consumed_train_samples": consumed_train_samples}
            writer.add_json(TRAINER_STATE, progress | {"model": state})
        self.runtime.barrier()
        return SaveResponse(str(writer.target), str(writer.target))

    def load(self, name: str, output_dir: str = "output", load_optimizer: bool = False, adapter_name: str | None = None) -> None:
        """Loads what ``save(name, output_dir)`` wrote. For a path, such as ``twinkle_path``: ``resume_from_checkpoint``."""
        self.resume_from_checkpoint(Path(output_dir) / safe_name(name), not load_optimizer, adapter_name)

    def resume_from_checkpoint(
        self, checkpoint_dir: Any, resume_only_model: bool = False, adapter_name: str | None = None
    ) -> dict[str, Any]:
        """Returns ``cur_step``, ``consumed_train_samples`` and ``gradient_accumulation_steps``. CheckpointError where
        optimizer state is wanted and the checkpoint has none."""
        training = self.training_state(adapter_name)
        reader = CheckpointReader(_path(checkpoint_dir))
        reader.verify()
        progress = reader.json(TRAINER_STATE)
        self.load_state(reader, progress["model"], not resume_only_model, adapter_name)
        return {
            "cur_step": training.cur_step,
            "consumed_train_samples": progress["consumed_train_samples"],
            "gradient_accumulation_steps": training.gradient_accumulation_steps,
        }

    def upload_to_hub(
        self, checkpoint_dir: Any, hub_model_id: str, hub_token: str | None = None, async_upload: bool = True
    ) -> None:
        """Uploads the ``adapter/`` or ``model/`` folder of a checkpoint. Only the main rank does."""
        from huggingface_hub import HfApi

        reader = CheckpointReader(_path(checkpoint_dir))
        folder = reader.hugging_face_folder("adapter" if reader.has("adapter") else "model")
        if self.runtime.is_main:
            api = HfApi(token=hub_token)
            api.create_repo(hub_model_id, exist_ok=True)
            api.upload_folder(repo_id=hub_model_id, folder_path=folder, run_as_future=async_upload)


def _path(checkpoint_dir: Any) -> Path:
    return Path(checkpoint_dir.checkpoint_dir if isinstance(checkpoint_dir, SaveResponse) else checkpoint_dir)
