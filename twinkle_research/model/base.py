"""The model interface: one trainer, one set of losses and one checkpoint format serve every backend.

The names are Twinkle's. The trainer calls ``count``, ``forward_backward`` and ``clip_grad_and_step``; the seed's
hand-written loops may also call the parts one by one.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from twinkle_research.data_format import InputFeature
from twinkle_research.errors import UserError

if TYPE_CHECKING:
    from twinkle_research.checkpoint.format import CheckpointReader, CheckpointWriter
    from twinkle_research.distributed.runtime import Runtime


@dataclass
class Result:
    """What a call answers, locally and remotely alike: ``.result`` is a plain dict (or float)."""

    result: Any

    def model_dump(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class SaveResponse:
    twinkle_path: str  # pass it to resume_from_checkpoint
    checkpoint_dir: str

    def __str__(self) -> str:
        return self.twinkle_path


@dataclass
class TrainConfigs:
    """What an adapter is trained with; ``model_dump()`` gives a dict for logs."""

    model_id: str
    adapter_name: str
    adapter: dict[str, Any] | None
    loss: str | None
    optimizer: dict[str, Any] | None
    scheduler: dict[str, Any] | None
    gradient_accumulation_steps: int
    trainable_parameters: int
    total_parameters: int

    def model_dump(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class NonFiniteLoss(UserError):
    """The loss or the gradient norm of a step is NaN or infinite. Weights and optimizer are untouched."""

    message: str
    rows: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return self.message


class TwinkleModel(ABC):
    """Interface of all backends. ``adapter_name=None`` means the only adapter; ambiguous is an error.

    ``inputs`` are features: dicts with ``input_ids`` and ``labels``, of equal length. Labels are shifted already: labels[t] is
    the token that is to come after input_ids[t], -100 where nothing is trained. (Hugging Face's labels are not: take
    labels[1:] + [-100].) Rows need no padding.
    """

    backend: str  # name of the config option that chooses this class; checkpoints record it

    def __init_subclass__(cls, **options: Any) -> None:
        """Methods without a docstring take that of the interface, so that help() says something."""
        super().__init_subclass__(**options)
        for name, method in inspect.getmembers(TwinkleModel, inspect.isfunction):
            own = getattr(cls, name)
            if own.__doc__ is None:
                own.__doc__ = method.__doc__

    # --- set-up -------------------------------------------------------------------------------------------------

    @abstractmethod
    def add_adapter_to_model(self, adapter_name: str, config_or_dir: Any, gradient_accumulation_steps: int = 1) -> None:
        """``config_or_dir``: a peft LoraConfig, or a PEFT folder to start from."""

    @abstractmethod
    def set_template(self, template_cls: Any, **kwargs: Any) -> None:
        """A Template, its class or its name."""

    @abstractmethod
    def set_processor(self, processor_cls: Any, **kwargs: Any) -> None:
        """An InputProcessor, its class or its name."""

    @abstractmethod
    def set_loss(self, loss_cls: Any, **kwargs: Any) -> None:
        """A Loss, its class or its name."""

    @abstractmethod
    def set_optimizer(self, optimizer_cls: Any, **kwargs: Any) -> None:
        """An optimizer's name, class or config."""

    @abstractmethod
    def set_lr_scheduler(self, scheduler_cls: Any, **kwargs: Any) -> None:
        """A schedule's name, config or function of the step."""

    @abstractmethod
    def add_metric(self, metric_cls: Any, is_training: bool | None = None, **kwargs: Any) -> None:
        """``is_training=None``: for training and for evaluation."""

    # --- compute ------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def data_parallel(self) -> tuple[int, int]:
        """(rank, size): which share of a global batch this process works on. Several processes may work on one share
        together; they are all given its rows, and all get its results."""

    @property
    @abstractmethod
    def shares(self) -> Runtime:
        """Sums, and gathered values in the order of the shares, that count each data-parallel share once, however many
        processes work on it. They are collective over all processes, which all get the result."""

    @property
    @abstractmethod
    def is_sharded(self) -> bool:
        """Whether no process has the whole model: then every pass, and generation, is collective."""

    @property
    @abstractmethod
    def layout(self) -> dict[str, Any]:
        """JSON-able facts on how the model lies on the processes, for the manifest of checkpoints."""

    @abstractmethod
    def sampling(self, adapter_name: str | None = None) -> AbstractContextManager[Any]:
        """The module to generate with, for as long as the context is open."""

    @abstractmethod
    def count(self, features: Sequence[InputFeature], adapter_name: str | None = None) -> int:
        """The loss's normaliser over the shares of all data-parallel ranks. Collective."""

    @abstractmethod
    def forward_backward(
        self, inputs: Sequence[InputFeature], normalizer: float | None = None, adapter_name: str | None = None, **loss_inputs: Any
    ) -> Result:
        """Adds the gradient of this rank's ``inputs``, cut into micro-batches by the processor. A feature's labels are shifted
        already: ``{"input_ids": [5, 6, 7], "labels": [-100, 7, -100]}`` trains 7 after 5, 6.

        ``loss_inputs``: what the loss reads beside the scores (``Loss.reads``), such as ``advantages``, one entry a row.
        With ``normalizer`` (the whole step's count) the loss is divided by it at once; with None sums and counts
        accumulate and are divided at the optimizer step. ``.result`` has ``loss`` (of these inputs), ``num_tokens``
        and ``logps`` (per row, aligned with labels; 0.0 where not trained).
        """

    @abstractmethod
    def forward_only(
        self, inputs: Sequence[InputFeature], adapter_name: str | None = None, disable_lora: bool = False, **loss_inputs: Any
    ) -> Result:
        """The same result without gradient and with dropout off. ``disable_lora=True`` scores with the base."""

    @abstractmethod
    def clip_grad_and_step(
        self, max_grad_norm: float | None = 1.0, norm_type: float = 2, adapter_name: str | None = None
    ) -> None:
        """Sums gradients over ranks, clips the global norm, steps optimizer and schedule, clears gradients.

        With ``gradient_accumulation_steps=G`` only each G-th call applies. Raises NonFiniteLoss before anything
        has changed.
        """

    @abstractmethod
    def zero_grad(self, adapter_name: str | None = None) -> None:
        """Clears the gradients, unless an accumulation window is open."""

    @abstractmethod
    def lr_step(self, adapter_name: str | None = None) -> None:
        """Moves the schedule on, once for each optimizer step."""

    @abstractmethod
    def finish_window(self, max_grad_norm: float | None = 1.0, adapter_name: str | None = None) -> None:
        """Applies a last, shorter accumulation window. Does nothing when none is open."""

    @abstractmethod
    def calculate_metric(self, is_training: bool, adapter_name: str | None = None) -> Result:
        """Metrics since the last call: ``loss``, ``grad_norm``, ``lr``, ``tokens`` and the loss's own. Collective."""

    @abstractmethod
    def get_train_configs(self, adapter_name: str | None = None) -> TrainConfigs:
        """What the adapter is trained with."""

    def close(self) -> None:  # noqa: B027 (most backends hold nothing)
        """Lets go of what the processes of the model hold together. Nothing can be computed afterwards. Collective."""

    # --- critic and reference -----------------------------------------------------------------------------------

    @abstractmethod
    def add_value_head(self, adapter_name: str | None = None, detach: bool = False) -> None:
        """Trains a value for each trained position beside the policy, from its last hidden states. Losses that ask for
        "values" get them, and results have ``values`` (per row, aligned with labels). ``detach``: without gradient into
        the policy. Must come before ``set_optimizer``."""

    @abstractmethod
    def set_reference(self, kind: str, adapter_name: str | None = None) -> None:
        """What ``reference_logps`` scores with: "base" (the adapter switched off), "frozen" (a copy of what is trained as it
        is now), "refreshed" (such a copy that ``refresh_reference`` brings up to date). A copy takes the memory of what is
        trained. It is saved, and loaded again together with the optimizer; loading weights alone leaves it as it is."""

    @abstractmethod
    def refresh_reference(self, rate: float = 1.0, adapter_name: str | None = None) -> None:
        """Moves a "refreshed" reference to the present weights, by ``rate`` of the way."""

    @abstractmethod
    def reference_logps(self, inputs: Sequence[InputFeature], adapter_name: str | None = None) -> list[list[float]]:
        """Per row the reference's log-probabilities, aligned with labels, 0.0 where not trained. Collective."""

    @abstractmethod
    def policy_scores(
        self, inputs: Sequence[InputFeature], adapter_name: str | None = None, dropout: bool = False
    ) -> dict[str, list[list[float]]]:
        """``logps``, and ``values`` where there is a value head, of the policy as it is now; per row, aligned with labels, 0.0
        where not trained. Neither gradient nor metrics. ``dropout``: with the masks that ``forward_backward`` would use on the
        same rows. Collective."""

    # --- state --------------------------------------------------------------------------------------------------

    @abstractmethod
    def save_state(
        self, writer: CheckpointWriter, save_optimizer: bool = True, adapter_name: str | None = None
    ) -> dict[str, Any]:
        """Streams weights (``model/`` or ``adapter/``) and ``optimizer/`` into an open checkpoint. Returns the
        JSON-able rest (step counters, schedule, open window) for trainer_state.json. Collective."""

    @abstractmethod
    def load_state(
        self,
        reader: CheckpointReader,
        state: dict[str, Any] | None,
        load_optimizer: bool = True,
        adapter_name: str | None = None,
    ) -> None:
        """Inverse of save_state, from a checkpoint of any backend and layout."""

    @abstractmethod
    def get_state_dict(self, adapter_name: str | None = None) -> dict[str, Any]:
        """Trainable tensors under Hugging Face (or PEFT) names."""

    @abstractmethod
    def named_weights(self, adapter_name: str | None = None) -> Iterable[tuple[str, Any]]:
        """Streams (Hugging Face name, full tensor) of the effective weights, adapter merged. Collective."""

    def disk_weights(self, adapter_name: str | None = None) -> Iterable[tuple[str, Any]]:
        """The same under the names, and in the shapes, of a Hugging Face folder, which is what loaders of other systems
        expect. Here for backends whose names are those already."""
        return self.named_weights(adapter_name)

    @abstractmethod
    def save(
        self,
        name: str | None = None,
        output_dir: str = "output",
        save_optimizer: bool = False,
        consumed_train_samples: int = 0,
        adapter_name: str | None = None,
    ) -> SaveResponse:
        """Writes the checkpoint ``output_dir/name``. Collective."""

    @abstractmethod
    def load(self, name: str, output_dir: str = "output", load_optimizer: bool = False, adapter_name: str | None = None) -> None:
        """Loads what ``save(name, output_dir)`` wrote. Collective."""

    @abstractmethod
    def resume_from_checkpoint(
        self, checkpoint_dir: Any, resume_only_model: bool = False, adapter_name: str | None = None
    ) -> dict[str, Any]:
        """Returns ``cur_step``, ``consumed_train_samples`` and ``gradient_accumulation_steps``."""

    @abstractmethod
    def upload_to_hub(
        self, checkpoint_dir: Any, hub_model_id: str, hub_token: str | None = None, async_upload: bool = True
    ) -> None:
        """Uploads the adapter or model of a checkpoint."""
