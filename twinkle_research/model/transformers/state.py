"""Weights, optimizer and open window of a TransformersModel, to and from a checkpoint, one tensor at a time.

Under any layout a rank holds its own part of what it stores, and beside it no more than one whole tensor (some times that
where transformers keeps it in another form than on disk, as the stacked experts of a mixture).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from twinkle_research.checkpoint.stream import TensorFolder, TensorSpec
from twinkle_research.errors import CheckpointError
from twinkle_research.model.layout import Layout
from twinkle_research.model.transformers.lora import config_json, tied_names
from twinkle_research.model.transformers.names import DiskNames
from twinkle_research.model.transformers.value_head import PREFIX

if TYPE_CHECKING:
    from twinkle_research.checkpoint.format import CheckpointReader, CheckpointWriter
    from twinkle_research.model.training import TrainingState
    from twinkle_research.model.transformers.compute import Trained
    from twinkle_research.model.transformers.model import TransformersModel

SLOT_ORDER = ("master", "exp_avg", "exp_avg_sq", "momentum")
Slots = dict[str, list[str]]


@dataclass(frozen=True)
class Part:
    """Tensors of a checkpoint, by name in memory in ``wanted``, each of which goes to ``put``. ``suffix``: as it has them."""

    tensors: TensorFolder
    wanted: Mapping[str, object]
    put: Callable[[str, Tensor], Any]
    suffix: str = ""


class ModelState:
    """What a model stores of one thing that it trains: the adapter, or else all weights and persistent buffers; with them
    the value head and the copy that a reference holds. ``among_others``: in a checkpoint of several adapters."""

    def __init__(self, model: TransformersModel, adapter_name: str | None = None, among_others: bool = False) -> None:
        self._model = model
        self._run: Trained = model.trained(adapter_name)
        self._training: TrainingState = self._run.training
        self._layout: Layout = self._training.layout
        self._policy = policy = {n: p for n, p in self._training.parameters.items() if not n.startswith(PREFIX)}
        self._critic = {name: p for name, p in self._training.parameters.items() if name.startswith(PREFIX)}
        critic = {name: p.shape for name, p in self._critic.items()}
        self._inside = f"/{self._run.name}" if among_others else ""
        if self._run.name:
            self.folder, self.stem = f"adapters{self._inside}" if among_others else "adapter", "adapter_model"
            self.weights: dict[str, Tensor] = policy
            self.aliases = tied_names(model.module, self._run.name)
            self.names = DiskNames(None, self._shapes(), critic)
        else:
            self.folder, self.stem = "model", "model"
            self.weights = policy | _buffers(model.module)
            self.aliases = {}
            self.names = DiskNames(model.module, self._shapes(), critic)

    def _shapes(self) -> dict[str, torch.Size]:
        return {name: self._layout.shape(name, tensor) for name, tensor in self.weights.items()}

    # --- saving -------------------------------------------------------------------------------------------------

    def save(self, writer: CheckpointWriter, save_optimizer: bool) -> dict[str, Any]:
        """Collective. Returns the JSON-able rest."""
        training, reference = self._training, self._run.reference
        self.write_weights(writer)
        if self._critic:
            self._add(writer, "critic", "value_head", [("", self._critic)])
            writer.add_json(f"critic{self._inside}/value_head.json", self._run.value_head.describe())
        if reference is not None and reference.copy:
            self._add(writer, "reference", "reference", [("", reference.stored())])
        if save_optimizer:
            training.consolidate_window()
            self._write_optimizer(writer)
            if training.window.has_gradients:
                self._add(writer, "window", "gradients", [("grad", training.gradients.tensors())])
        return training.state() | {
            "adapter": self._run.name or None,
            "reference": reference.kind if reference else None,
            "optimizer": training.optimizer.spec.describe() if save_optimizer and training.optimizer else None,
            "scheduler": training.schedule.describe(),
        }

    def write_weights(self, writer: CheckpointWriter) -> None:
        aliases = {alias: self.weights[name] for alias, name in self.aliases.items()}
        specs = self.names.specs({name: self._layout.dtype(name, t) for name, t in self.weights.items()})
        specs += [TensorSpec.of(name, tensor) for name, tensor in aliases.items()]

        def stream() -> Iterator[tuple[str, Tensor]]:
            yield from self.names.to_disk(self.whole_weight, self.weights)
            yield from ((name, tensor.detach()) for name, tensor in aliases.items())

        if self._run.name:
            writer.add_tensors(self.folder, specs, stream(), stem=self.stem, max_shard_bytes=None)
            writer.add_json(f"{self.folder}/adapter_config.json", config_json(self._model.module.peft_config[self._run.name]))
        else:
            writer.add_tensors(self.folder, specs, stream(), stem=self.stem)
            writer.add_files(self.folder, self._write_configs)

    def whole_weight(self, name: str) -> Tensor:
        """As it is stored. Collective."""
        tensor = self.weights[name].detach()
        return self._layout.whole(name, tensor.to(self._layout.dtype(name, tensor)))

    def _write_configs(self, folder: Path) -> None:
        module = self._model.module
        module.config.architectures = [class_name(module)]
        module.config.dtype = str(self._model.dtype).removeprefix("torch.")
        module.config.save_pretrained(folder)
        if module.generation_config is not None:
            module.generation_config.save_pretrained(folder)
        if self._run.template is not None:
            self._run.template.tokenizer.save_pretrained(folder)

    def _write_optimizer(self, writer: CheckpointWriter) -> None:
        optimizer = self._training.optimizer
        if optimizer is None:
            return
        slots: dict[str, dict[str, Tensor]] = {slot: {} for slot in SLOT_ORDER}
        for name, slot, tensor in optimizer.state():
            slots[slot][name] = tensor
        if any(slots.values()):
            self._add(writer, "optimizer", "optimizer", [(slot, tensors) for slot, tensors in slots.items() if tensors])

    def _add(self, writer: CheckpointWriter, folder: str, stem: str, parts: list[tuple[str, Mapping[str, Tensor]]]) -> None:
        """Tensors by name in memory, each part under its own suffix."""
        parts = [(f".{suffix}" if suffix else "", tensors) for suffix, tensors in parts]
        specs: list[TensorSpec] = []
        for suffix, tensors in parts:
            specs += self.names.specs({name: tensor.dtype for name, tensor in tensors.items()}, suffix)

        def stream() -> Iterator[tuple[str, Tensor]]:
            for suffix, tensors in parts:
                for name, tensor in self.names.to_disk(lambda n, own=tensors: self._layout.whole(n, own[n]), tensors):
                    yield name + suffix, tensor

        writer.add_tensors(folder + self._inside, specs, stream(), stem=stem)

    # --- loading ------------------------------------------------------------------------------------------------

    def load(self, reader: CheckpointReader, state: Mapping[str, Any] | None, load_optimizer: bool) -> None:
        """Raises CheckpointError where the checkpoint does not fit; nothing has changed then."""
        self.plan(reader, state, load_optimizer)()

    def plan(self, reader: CheckpointReader, state: Mapping[str, Any] | None, load_optimizer: bool) -> Callable[[], None]:
        """Checks everything that ``load`` would put in place, and returns what does so."""
        if not reader.has(self.folder):
            held = " and ".join(name for name in ("model", "adapter") if reader.has(name)) or "no weights"
            trains = (
                "an adapter (adapter=none trains the model)" if self._run.name else "the model (adapter=lora adds an adapter)"
            )
            raise CheckpointError(f"{reader.path} holds {held}, but this run trains {trains}")
        self._check_companions(reader, state if load_optimizer else None)
        parts = [self._weights_part(reader.tensors(self.folder, self.stem))]
        if self._critic:
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
            self.names.check(part.tensors, part.wanted, part.suffix)

        def load() -> None:
            if reference is not None and self._run.reference is None:
                self._model.set_reference(reference, self._run.name)
            self._layout.release()
            if load_optimizer:
                training.optimizer.start_load(slots, int(state["optimizer_steps"]))
                training.load(state)
            with torch.no_grad():
                for part in parts:
                    for name, tensor in self.names.parts_from_disk(part.tensors, part.wanted, self._layout.rows, part.suffix):
                        part.put(name, tensor)
            if not load_optimizer and training.optimizer is not None:
                training.set_optimizer(training.optimizer.spec)

        return load

    def _check_companions(self, reader: CheckpointReader, state: Mapping[str, Any] | None) -> None:
        """``state``: None where only weights are loaded; a reference then stays what it is."""
        if bool(self._critic) != reader.has(f"critic{self._inside}"):
            held = ("no", "one: load its weights before") if self._critic else ("a", "none: call")
            order = "" if self._critic else " (before set_optimizer)"
            raise CheckpointError(f"{reader.path} holds {held[0]} value head, but this run has {held[1]} add_value_head{order}")
        if state is None:
            return
        stored, reference = state.get("reference"), self._run.reference
        if reference is not None and reference.kind != stored:
            raise CheckpointError(f"{reader.path} holds the reference {stored or 'none'!r}, but this run has {reference.kind!r}")

    def load_weights(self, tensors: TensorFolder) -> None:
        """Raises CheckpointError for a tensor that is missing, unknown or of another shape; nothing is loaded then."""
        part = self._weights_part(tensors)
        self.names.check(tensors, part.wanted)
        self._layout.release()
        with torch.no_grad():
            for name, tensor in self.names.parts_from_disk(tensors, part.wanted, self._layout.rows):
                part.put(name, tensor)

    def _weights_part(self, tensors: TensorFolder) -> Part:
        expected = {on_disk for name in self.weights for on_disk in self.names.of(name)}
        for missing in sorted(expected - set(tensors)):
            raise CheckpointError(f"{tensors.path}: tensor {missing} is missing")
        for extra in sorted(set(tensors) - expected - set(self.aliases)):
            raise CheckpointError(f"{tensors.path}: tensor {extra} is not part of this model")
        return Part(tensors, self.weights, _copy_into(self.weights))

    def _optimizer_parts(self, reader: CheckpointReader, steps_done: int) -> tuple[Slots, list[Part]]:
        optimizer = self._training.optimizer
        folder = f"optimizer{self._inside}"
        tensors = reader.tensors(folder, "optimizer") if reader.has(folder) else {}
        known = {
            f"{on_disk}.{slot}" for name in self._training.parameters for on_disk in self.names.of(name) for slot in SLOT_ORDER
        }
        for extra in sorted(set(tensors) - known):
            raise CheckpointError(f"{reader.path}/{folder}: tensor {extra} belongs to nothing that this run trains")
        slots = {
            name: [slot for slot in SLOT_ORDER if all(f"{part}.{slot}" in tensors for part in self.names.of(name))]
            for name in self._training.parameters
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

        def put(name: str, gradient: Tensor) -> None:
            if training.runtime.is_main or self._layout.is_sharded(name):
                training.gradients.add_(name, gradient)

        if not window.has_gradients:
            return []
        return [Part(reader.tensors(f"window{self._inside}", "gradients"), training.parameters, put, ".grad")]


def _copy_into(tensors: Mapping[str, Tensor]) -> Callable[[str, Tensor], Any]:
    return lambda name, part: tensors[name].copy_(part)


def class_name(module: torch.nn.Module) -> str:
    """transformers' name of the model's class; sharding puts its own before it."""
    return type(module).__name__.removeprefix("FSDP")


def _buffers(module: torch.nn.Module) -> dict[str, Tensor]:
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    return {name: tensor for name, tensor in module.state_dict(keep_vars=True).items() if name not in parameters}
