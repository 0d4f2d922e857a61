"""A sharded checkpoint as a consolidated one: the same files that would have been written in the first place."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from twinkle_research.checkpoint.folder import shard_bytes
from twinkle_research.checkpoint.format import CheckpointReader, CheckpointWriter
from twinkle_research.checkpoint.names import MANIFEST, PARTS
from twinkle_research.checkpoint.newest import newest_checkpoint
from twinkle_research.checkpoint.stream import TensorFolder
from twinkle_research.errors import CheckpointError

if TYPE_CHECKING:
    import torch


def consolidate(path: str | Path, out: str | Path) -> Path:
    """Writes the checkpoint ``out`` from ``path``, a sharded checkpoint or a run folder (its newest checkpoint). Bits stay what
    they are; one tensor is held at a time.

    Raises CheckpointError for a damaged source, for one whose tensors are whole already, and where ``out`` exists.
    """
    path, out = Path(path), Path(out)
    if out.exists():
        raise CheckpointError(f"{out} exists; choose a new folder")
    checkpoint = path if (path / MANIFEST).exists() else newest_checkpoint(path, "size")
    if checkpoint is None:
        raise CheckpointError(f"{path} holds no finished checkpoint")
    reader = CheckpointReader(checkpoint)
    reader.verify("full")
    manifest = reader.manifest
    folders = {name.rpartition("/")[0] for name in manifest.files}
    parted = {folder: stem for folder in sorted(folders) if (stem := reader.parted(folder))}
    if not parted:
        raise CheckpointError(f"the tensors of {checkpoint} are whole: there is nothing to convert, every run can go on from it")
    with CheckpointWriter(
        out.parent, out.name, step=manifest.step, backend=manifest.backend, layout=manifest.layout,
        config_hash=manifest.config_hash, metric=manifest.metric,
    ) as writer:  # fmt: skip
        copied = set(manifest.files)
        for folder, stem in parted.items():
            tensors = reader.tensors(folder, stem)
            copied -= {f"{folder}/{file}" for file in [f"{stem}{PARTS}", *tensors.files]}
            specs = [tensors.spec(name) for name in tensors]
            writer.add_tensors(folder, specs, _stream(tensors), stem=stem, max_shard_bytes=shard_bytes(stem))
        for name in sorted(copied):
            folder, _, file = name.rpartition("/")
            shutil.copyfile(reader.resolve(name), writer.path(folder) / file)
    return out


def _stream(tensors: TensorFolder) -> Iterator[tuple[str, torch.Tensor]]:
    for name in tensors:
        yield name, tensors[name]
