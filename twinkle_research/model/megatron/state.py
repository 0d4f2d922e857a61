"""Weights, optimizer and open window of a MegatronModel, to and from a checkpoint.

The folders are those of every backend. Beside its own part a process holds one of its tensors whole (where the distributed
optimizer spreads it) and a bucket of the directory at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from twinkle_research.checkpoint.parts import PartedTensor
from twinkle_research.checkpoint.sharded import ShardedWriter
from twinkle_research.checkpoint.stream import TensorSpec
from twinkle_research.model.megatron import families
from twinkle_research.model.megatron.directory import Directory
from twinkle_research.model.megatron.pieces import Piece
from twinkle_research.model.state import ModelState, Part, Stored

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig

    from twinkle_research.checkpoint.format import CheckpointWriter
    from twinkle_research.model.megatron.model import MegatronModel


class MegatronState(ModelState):
    def __init__(self, model: MegatronModel, adapter_name: str | None = None, among_others: bool = False) -> None:
        super().__init__(model, model.trained(adapter_name), among_others)
        self._model: MegatronModel
        self.weights = self._policy
        self._directories = [model.directory_of(self._run)]
        if self._run.value_head is not None:
            # The last pipeline stage trains it; on the others the directory only knows of it.
            self._directories.append(Directory(model.mesh, {n: [Piece.whole(n, p.shape)] for n, p in self._critic.items()}))

    # --- names and parts ----------------------------------------------------------------------------------------

    def _stored(self, stored: Stored) -> tuple[list[TensorSpec], Iterable[tuple[str, Tensor]]]:
        chosen = list(self._chosen(stored))
        specs = [spec for directory, dtypes in chosen for spec in directory.specs(dtypes, stored.suffix)]
        streams = [directory.stream(stored.tensor_of, dtypes=dtypes) for directory, dtypes in chosen]
        return specs, ((name + stored.suffix, tensor) for stream in streams for name, tensor in stream)

    def _add(self, writer: CheckpointWriter, folder: str, stem: str, parts: list[Stored]) -> None:
        if not isinstance(writer, ShardedWriter):
            super()._add(writer, folder, stem, parts)
            return
        tensors: list[PartedTensor] = []
        streams = []
        for stored in parts:
            for directory, dtypes in self._chosen(stored):
                # Whoever holds the same of the whole model is a data-parallel replica: their bits are the same.
                spread = stored.replicated and directory is self._directories[0]
                parted = directory.parted(dtypes, stored.suffix, spread=spread)
                tensors += parted
                streams.append(directory.own_parts(stored.tensor_of, parted, stored.suffix))
        if tensors:
            writer.add_parts(folder, stem, tensors, (pair for stream in streams for pair in stream))

    def _chosen(self, stored: Stored) -> Iterator[tuple[Directory, dict[str, torch.dtype]]]:
        """The directories that have something of it, with the dtypes of their tensors. Collective."""
        for directory in self._directories:
            own = directory.loaded()
            held = [name in stored.names for name in own]
            if any(held) and not all(held):
                raise ValueError(f"{own[held.index(False)]} is left out of what is stored with suffix {stored.suffix!r}")
            if not self._model.runtime.any(any(held)):
                continue
            if stored.suffix:  # of an optimizer or a window; to make one only to see its dtype would cost as much as storing it
                dtypes = dict.fromkeys(directory.shapes, torch.float32)
            else:
                dtypes = directory.dtypes(stored.tensor_of)
            yield directory, dtypes

    def _check(self, part: Part) -> None:
        for directory in self._directories:
            names = {on_disk for name in self._held(directory, part) for on_disk in directory.tensors_of(name)}
            directory.check(part.tensors, names, part.suffix, is_ignored=lambda name: True)

    def _own_parts(self, part: Part) -> Iterator[tuple[str, Tensor]]:
        for directory in self._directories:
            for name in self._held(directory, part):
                like = self._training.parameters[name]
                target = torch.empty(like.shape, dtype=_dtype_on_disk(directory, name, part) or like.dtype, device=like.device)
                directory.fill(part.tensors, name, target, part.suffix)
                yield name, target

    @staticmethod
    def _held(directory: Directory, part: Part) -> list[str]:
        return [name for name in directory.loaded() if name in part.wanted]

    def _on_disk(self, name: str) -> list[str]:
        directory = next(directory for directory in self._directories if name in directory)
        return directory.tensors_of(name)

    def _weight_names(self) -> set[str]:
        return set(self._directories[0].shapes)

    def _trained_names(self) -> set[str]:
        return {name for directory in self._directories for name in directory.shapes}

    def _may_be_there(self, name: str) -> bool:
        return not self._run.name and families.is_ignored(self._model.architecture, name)

    def write_weights(self, writer: CheckpointWriter) -> None:
        self._training.layout.release()
        super().write_weights(writer)

    def trained_tensors(self) -> Iterator[tuple[str, Tensor]]:
        self._training.layout.release()
        return super().trained_tensors()

    # --- what stands beside the tensors -------------------------------------------------------------------------

    def _configs(self) -> tuple[PretrainedConfig, GenerationConfig | None]:
        from transformers import GenerationConfig
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

        config = copy.deepcopy(self._model.architecture.config)
        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
        config.dtype = str(self._model.dtype).removeprefix("torch.")
        if (Path(self._model.folder) / "generation_config.json").is_file():
            return config, GenerationConfig.from_pretrained(self._model.folder)
        return config, GenerationConfig.from_model_config(config)


def _dtype_on_disk(directory: Directory, name: str, part: Part) -> torch.dtype | None:
    """None for a part of the vocabulary that is padding alone."""
    on_disk = next(iter(directory.tensors_of(name)), None)
    return None if on_disk is None else getattr(torch, part.tensors.spec(on_disk + part.suffix).dtype)
