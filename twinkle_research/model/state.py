"""What a model stores of one thing that it trains: what a checkpoint must hold, what of it is refused, and in which order it
is put in place. How tensors lie on processes and get their names on disk is each backend's own.

Names are those in memory, on this process; it stores and loads its part of them. On disk there are Hugging Face's (PEFT's),
and a tensor is whole.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from twinkle_research.checkpoint.folder import shard_bytes
from twinkle_research.checkpoint.stream import TensorFolder, TensorSpec
from twinkle_research.errors import CheckpointError
from twinkle_research.model.value_head import PREFIX

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig

    from twinkle_research.checkpoint.format import CheckpointReader, CheckpointWriter
    from twinkle_research.model.passes import Trained
    from twinkle_research.model.saving import SavingMixin
    from twinkle_research.model.training import TrainingState

SLOT_ORDER = ("master", "exp_avg", "exp_avg_sq", "momentum")
Slots = dict[str, list[str]]
T = TypeVar("T")


@dataclass(frozen=True)
class Stored:
    """Tensors that go into a checkpoint, under ``suffix`` behind their names on disk."""

    names: Collection[str]
    tensor_of: Callable[[str], Tensor]
    suffix: str = ""
    dtype_of: Callable[[str], torch.dtype] | None = None  # on disk, where that is not the tensors' own
    replicated: bool = True  # whether processes that hold the same part have the same in it


@dataclass(frozen=True)
class Part:
    """Tensors of a checkpoint. Each process's part of what ``wanted`` names goes to ``put``."""

    tensors: TensorFolder
    wanted: Collection[str]
    put: Callable[[str, Tensor], Any]
    suffix: str = ""


class ModelState(ABC):
    """The adapter, or else all weights and persistent buffers; with them the value head, the copy that a reference holds, the
    optimizer and the open window. ``among_others``: in a checkpoint of several adapters. All methods are collective."""

    weights: Mapping[str, Tensor]

    def __init__(self, model: SavingMixin, run: Trained, among_others: bool = False) -> None:
        self._model = model
        self._run = run
        self._training: TrainingState = run.training
        parameters = self._training.parameters
        self._policy: dict[str, Tensor] = {name: p for name, p in parameters.items() if not name.startswith(PREFIX)}
        self._critic: dict[str, Tensor] = {name: p for name, p in parameters.items() if name.startswith(PREFIX)}
        self._inside = f"/{run.name}" if among_others else ""
        if run.name:
            self.folder, self.stem = f"adapters{self._inside}" if among_others else "adapter", "adapter_model"
        else:
            self.folder, self.stem = "model", "model"

    # --- what a backend knows -----------------------------------------------------------------------------------

    @abstractmethod
    def _stored(self, stored: Stored) -> tuple[list[TensorSpec], Iterable[tuple[str, Tensor]]]:
        """What will be on disk, and the whole tensors, made one after the other."""

    @abstractmethod
    def _check(self, part: Part) -> None:
        """Raises CheckpointError where a tensor of ``part`` is missing or has another shape than in the model."""

    @abstractmethod
    def _own_parts(self, part: Part) -> Iterator[tuple[str, Tensor]]:
        """(name in memory, this process's part), one after the other."""

    @abstractmethod
    def _on_disk(self, name: str) -> list[str]:
        """The tensors on disk of which this process's ``name`` holds something."""

    @abstractmethod
    def _weight_names(self) -> set[str]:
        """On disk, of all processes."""

    @abstractmethod
    def _trained_names(self) -> set[str]:
        """The same of what is trained, the value head included."""

    @abstractmethod
    def _may_be_there(self, name: str) -> bool:
        """Whether a folder of weights may hold the tensor ``name`` beside ``_weight_names``."""

    def _as_stored(self, names: Collection[str]) -> Stored:
        """Some of ``weights``."""
        return Stored(names, lambda name: self.weights[name].detach())

    def _stored_weights(self) -> list[Stored]:
        """All of them."""
        return [self._as_stored(self.weights)]

    @abstractmethod
    def _configs(self) -> tuple[PretrainedConfig, GenerationConfig | None]:
        """Of a model folder."""

    # --- saving -------------------------------------------------------------------------------------------------

    def save(self, writer: CheckpointWriter, save_optimizer: bool) -> dict[str, Any]:
        """Returns the JSON-able rest."""
        training, reference = self._training, self._run.reference
        self.write_weights(writer)
        if self._run.value_head is not None:
            self._add(writer, f"critic{self._inside}", "value_head", [Stored(self._critic, self._critic.__getitem__)])
            writer.add_json(f"critic{self._inside}/value_head.json", self._run.value_head.describe())
        if reference is not None and reference.kind != "base":
            held = Stored(self._policy, reference.stored().__getitem__)
            self._add(writer, f"reference{self._inside}", "reference", [held])
        if save_optimizer:
            training.consolidate_window()
            self._write_optimizer(writer)
            if training.window.has_gradients:
                gradients = training.gradients.tensors()
                sums = Stored(gradients, gradients.__getitem__, ".grad", replicated=False)
                self._add(writer, f"window{self._inside}", "gradients", [sums])
        return training.state() | {
            "adapter": self._run.name or None,
            "reference": reference.kind if reference else None,
            "optimizer": training.optimizer.spec.describe() if save_optimizer and training.optimizer else None,
            "scheduler": training.schedule.describe(),
        }

    def write_weights(self, writer: CheckpointWriter) -> None:
        self._add(writer, self.folder, self.stem, self._stored_weights())
        if self._run.name:
            writer.add_json(f"{self.folder}/adapter_config.json", self._model.adapter_json(self._run.name))
        else:
            writer.add_files(self.folder, self._write_configs)

    def _write_configs(self, folder: Path) -> None:
        config, generation = self._configs()
        config.save_pretrained(folder)
        if generation is not None:
            generation.save_pretrained(folder)
        if self._run.template is not None:
            self._run.template.tokenizer.save_pretrained(folder)

    def _write_optimizer(self, writer: CheckpointWriter) -> None:
        optimizer = self._training.optimizer
        if optimizer is None:
            return
        slots = {name: optimizer.slots(name) for name in self._training.parameters}
        parts = [
            Stored({n: None for n in slots if slot in slots[n]}, lambda name, own=slot: optimizer.tensor(name, own), f".{slot}")
            for slot in SLOT_ORDER
        ]
        self._add(writer, f"optimizer{self._inside}", "optimizer", parts)

    def _add(self, writer: CheckpointWriter, folder: str, stem: str, parts: list[Stored]) -> None:
        """Writes ``parts`` as one set of tensors; nothing where there is none in them."""
        announced = [self._stored(part) for part in parts]
        specs = [spec for specs, _ in announced for spec in specs]
        if specs:
            tensors = (pair for _, tensors in announced for pair in tensors)
            writer.add_tensors(folder, specs, tensors, stem=stem, max_shard_bytes=shard_bytes(stem))

    def trained_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name on disk, whole tensor) of what is trained, the value head aside."""
        return iter(self._stored(self._as_stored(self._policy))[1])

    # --- loading ------------------------------------------------------------------------------------------------

    def load(self, reader: CheckpointReader, state: Mapping[str, Any] | None, load_optimizer: bool) -> None:
        """Raises CheckpointError, on all processes alike, where the checkpoint does not fit; nothing has changed then."""
        self.plan(reader, state, load_optimizer)()

    def plan(self, reader: CheckpointReader, state: Mapping[str, Any] | None, load_optimizer: bool) -> Callable[[], None]:
        """Checks everything that ``load`` would put in place, and returns what does so."""
        return self._agreed(lambda: self._plan(reader, state, load_optimizer))

    def load_weights(self, tensors: TensorFolder) -> None:
        """Raises CheckpointError for a tensor that is missing, unknown or of another shape; nothing is loaded then."""

        def checked() -> Part:
            part = self._weights_part(tensors)
            self._check(part)
            return part

        part = self._agreed(checked)
        self._training.layout.release()
        self._put(part)

    def _agreed(self, check: Callable[[], T]) -> T:
        """What one process refuses all refuse: each sees a part of the names only."""
        found: T | None = None
        refused: CheckpointError | None = None
        try:
            found = check()
        except CheckpointError as error:
            refused = error
        everywhere = self._model.runtime.gather_objects(None if refused is None else str(refused))
        if refused is not None:
            raise refused
        for message in everywhere:
            if message is not None:
                raise CheckpointError(message)
        return found

    def _plan(self, reader: CheckpointReader, state: Mapping[str, Any] | None, load_optimizer: bool) -> Callable[[], None]:
        self._check_held(reader)
        self._check_companions(reader, state if load_optimizer else None)
        parts = [self._weights_part(reader.tensors(self.folder, self.stem))]
        if self._run.value_head is not None:
            parts.append(Part(reader.tensors(f"critic{self._inside}", "value_head"), self._critic, _copy_into(self._critic)))
        training, reference = self._training, None
        slots: Slots = {}
        if load_optimizer:
            if training.optimizer is None:
                raise CheckpointError("set_optimizer must come before a checkpoint is loaded with its optimizer state")
            if state is None or state["optimizer"] is None:
                raise CheckpointError(f"{reader.path} was saved without optimizer state: only its weights can be loaded")
            reference = state.get("reference")
            slots, more = self._optimizer_parts(reader, int(state["optimizer_steps"]))
            parts += more + self._window_parts(reader, state)
            if reference not in (None, "base"):
                tensors = reader.tensors(f"reference{self._inside}", "reference")
                parts.append(Part(tensors, self._policy, lambda name, part: self._run.reference.load(name, part)))
        for part in parts:
            self._check(part)

        def load() -> None:
            if reference is not None and self._run.reference is None:
                self._model.set_reference(reference, self._run.name)
            training.layout.release()
            if load_optimizer:
                training.optimizer.start_load(slots, int(state["optimizer_steps"]))
                training.load(state)
            for part in parts:
                self._put(part)
            if not load_optimizer and training.optimizer is not None:
                training.set_optimizer(training.optimizer.spec)

        return load

    @torch.no_grad()
    def _put(self, part: Part) -> None:
        for name, tensor in self._own_parts(part):
            part.put(name, tensor)

    def _check_held(self, reader: CheckpointReader) -> None:
        if not reader.has(self.folder):
            held = " and ".join(name for name in ("model", "adapter") if reader.has(name)) or "no weights"
            trains = (
                "an adapter (adapter=none trains the model)" if self._run.name else "the model (adapter=lora adds an adapter)"
            )
            raise CheckpointError(f"{reader.path} holds {held}, but this run trains {trains}")

    def _check_companions(self, reader: CheckpointReader, state: Mapping[str, Any] | None) -> None:
        """``state``: None where only weights are loaded; a reference then stays what it is."""
        has_critic = self._run.value_head is not None
        if has_critic != reader.has(f"critic{self._inside}"):
            held = ("no", "one: load its weights before") if has_critic else ("a", "none: call")
            order = "" if has_critic else " (before set_optimizer)"
            raise CheckpointError(f"{reader.path} holds {held[0]} value head, but this run has {held[1]} add_value_head{order}")
        if state is None:
            return
        stored, reference = state.get("reference"), self._run.reference
        if reference is not None and reference.kind != stored:
            raise CheckpointError(f"{reader.path} holds the reference {stored or 'none'!r}, but this run has {reference.kind!r}")

    def _weights_part(self, tensors: TensorFolder) -> Part:
        expected = self._weight_names()
        for missing in sorted(expected - set(tensors)):
            raise CheckpointError(f"{tensors.path}: tensor {missing} is missing")
        for extra in sorted(name for name in set(tensors) - expected if not self._may_be_there(name)):
            raise CheckpointError(f"{tensors.path}: tensor {extra} is not part of this model")
        return Part(tensors, self.weights, _copy_into(self.weights))

    def _optimizer_parts(self, reader: CheckpointReader, steps_done: int) -> tuple[Slots, list[Part]]:
        optimizer = self._training.optimizer
        folder = f"optimizer{self._inside}"
        tensors = reader.tensors(folder, "optimizer") if reader.has(folder) else {}
        known = {f"{on_disk}.{slot}" for on_disk in self._trained_names() for slot in SLOT_ORDER}
        for extra in sorted(set(tensors) - known):
            raise CheckpointError(f"{reader.path}/{folder}: tensor {extra} belongs to nothing that this run trains")
        slots = {
            name: [slot for slot in SLOT_ORDER if all(f"{part}.{slot}" in tensors for part in self._on_disk(name))]
            for name in self._training.parameters
            if self._on_disk(name)  # else it is padding
        }
        optimizer.check_load(slots, steps_done)
        parts = []
        for slot in SLOT_ORDER:
            wanted = {name: None for name in slots if slot in slots[name]}
            if wanted:
                parts.append(Part(tensors, wanted, lambda name, part, own=slot: optimizer.load(name, own, part), f".{slot}"))
        return slots, parts

    def _window_parts(self, reader: CheckpointReader, state: Mapping[str, Any]) -> list[Part]:
        training = self._training
        _, _, window = training.check_load(state)
        if not window.has_gradients:
            return []
        tensors = reader.tensors(f"window{self._inside}", "gradients")

        def put(name: str, gradient: Tensor) -> None:
            training.gradients.restore(name, gradient, training.runtime)

        return [Part(tensors, training.parameters, put, ".grad")]


def _copy_into(tensors: Mapping[str, Tensor]) -> Callable[[str, Tensor], Any]:
    return lambda name, part: tensors[name].copy_(part)
