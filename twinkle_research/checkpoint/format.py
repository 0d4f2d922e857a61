"""The consolidated checkpoint: a folder that is complete or not there, with a manifest of what is in it.

    step-000010/manifest.json  trainer_state.json  model/ or adapter/ or adapters/<name>/  optimizer/

With checkpoint.format=sharded the tensors of each of these folders lie in parts (parts.py); all else is the same, and readers
see whole tensors in either case.

``CheckpointWriter`` fills ``<name>.tmp``, flushes it to the disk and renames it; ``CheckpointReader`` opens a finished
one, trusting nothing in it. Neither imports torch before a tensor is written or read.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal

from twinkle_research.checkpoint.files import sha256_file, write_new, write_pointer
from twinkle_research.checkpoint.folder import MAX_SHARD_BYTES, FolderWriter
from twinkle_research.checkpoint.manifest import Manifest, manifests, read_manifest
from twinkle_research.checkpoint.names import (
    LATEST,
    MANIFEST,
    PARTS,
    UnsafeCheckpoint,
    refuse_pickle,
    resolve_inside,
    safe_name,
    safe_relative,
)  # fmt: skip
from twinkle_research.checkpoint.parts import PartedFolder, open_tensors
from twinkle_research.checkpoint.stream import TensorFolder, TensorSpec
from twinkle_research.errors import CheckpointError, nearest

__all__ = [
    "MAX_SHARD_BYTES", "CheckpointReader", "CheckpointWriter", "TensorFolder", "TensorSpec", "publish_latest", "safe_name",
]  # fmt: skip


class CheckpointWriter(FolderWriter):
    """Writes the checkpoint ``root/name`` with its manifest.

        with CheckpointWriter(root, "step-000010", step=10, backend="transformers") as writer:
            writer.add_tensors("adapter", specs, tensors, stem="adapter_model", max_shard_bytes=None)
            writer.add_tensors("optimizer", specs, tensors, stem="optimizer")
            writer.add_json("adapter/adapter_config.json", {...})
            writer.add_files("adapter", tokenizer.save_pretrained)
            writer.add_json("trainer_state.json", {...})

    ``layout``: JSON-able facts on how the run was laid out (``{"world_size": 2, "sharding": "ddp"}``); ``metric``: the
    eval/loss at this step, if there is one.
    """

    def __init__(
        self, root: str | Path, name: str, *, step: int, backend: str, layout: dict[str, Any] | None = None,
        config_hash: str = "", metric: float | None = None, is_writer: bool = True, deferred: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(Path(root) / safe_name(name), is_writer=is_writer, deferred=deferred)
        self._about = {"step": step, "backend": backend, "layout": layout or {}, "config_hash": config_hash, "metric": metric}

    def _finish(self) -> None:
        files = {}
        for name in self.written_files():
            refuse_pickle(safe_relative(name, str(self.target)), str(self.target))
            size, digest = self._hashes.get(name) or (os.path.getsize(self.folder / name), sha256_file(self.folder / name))
            files[name] = {"size": size, "sha256": digest}
        sequence = 1 + max((m.sequence for m in manifests(self.target.parent).values()), default=0)
        write_new(self.folder / MANIFEST, Manifest(sequence=sequence, files=files, **self._about).to_bytes())


class CheckpointReader:
    """A finished checkpoint. Opening it checks the manifest and that nothing in the folder is a pickle or a link;
    ``verify`` checks the files themselves. Raises CheckpointError (UnsafeCheckpoint) saying what is wrong where."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.manifest = read_manifest(self.path)
        for folder, folders, files in os.walk(self.path):
            for name in folders + files:
                if os.path.islink(os.path.join(folder, name)):
                    raise UnsafeCheckpoint(f"{self.path}: '{os.path.join(folder, name)}' is refused: it is a symbolic link")
            for name in files:
                refuse_pickle(name, folder)

    @property
    def step(self) -> int:
        return self.manifest.step

    def has(self, name: str) -> bool:
        """Whether the file or folder ``name`` ("optimizer", "trainer_state.json") is part of this checkpoint."""
        return name in self.manifest.files or any(file.startswith(f"{name}/") for file in self.manifest.files)

    def resolve(self, name: str) -> Path:
        """The path of a file or folder of this checkpoint. Raises CheckpointError where it has none of that name."""
        safe_relative(name, str(self.path))
        if not self.has(name):
            known = sorted({part for file in self.manifest.files for part in (file, file.split("/")[0])})
            raise CheckpointError(f"{self.path} holds no '{name}'; {nearest(name, known)}")
        return resolve_inside(self.path, name, str(self.path))

    def json(self, name: str) -> Any:
        path = self.resolve(name)
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} is damaged: {error}") from error

    def tensors(self, folder: str, stem: str | None = None) -> TensorFolder:
        """The tensors of ``folder`` by name, each read when it is asked for."""
        tensors = open_tensors(self.resolve(folder), stem)
        index = [f"{tensors.stem}{PARTS}"] if isinstance(tensors, PartedFolder) else []
        for file in [*index, *tensors.files]:
            if f"{folder}/{file}" not in self.manifest.files:
                raise CheckpointError(f"{self.path}: {folder}/{file} is not in the manifest")
        return tensors

    def hugging_face_folder(self, name: str) -> Path:
        """As ``resolve``, of a folder that other programs read. Raises CheckpointError where its tensors lie in parts."""
        path = self.resolve(name)
        if self.parted(name):
            raise CheckpointError(
                f"{path} holds the parts of tensors that checkpoint.format=sharded writes. Make whole ones: "
                f"python -m twinkle_research.checkpoint convert {self.path} -o <new folder>"
            )
        return path

    def parted(self, folder: str) -> str | None:
        """The name before ``.parts.json`` where the tensors of ``folder`` lie in parts."""
        found = (file.removeprefix(f"{folder}/") for file in self.manifest.files if file.startswith(f"{folder}/"))
        return next((name.removesuffix(PARTS) for name in found if name.endswith(PARTS) and "/" not in name), None)

    def problems(self, level: Literal["size", "full"] = "full") -> list[str]:
        """What is missing or damaged, one line a file. "size" does not read the files, "full" hashes them."""
        found = []
        for name, entry in self.manifest.files.items():
            path = resolve_inside(self.path, name, str(self.path))
            if not path.is_file():
                found.append(f"{name} is missing")
            elif (size := os.path.getsize(path)) != entry["size"]:
                found.append(f"{name} has {size} bytes instead of {entry['size']}")
            elif level == "full" and sha256_file(path) != entry["sha256"]:
                found.append(f"{name} is damaged (its SHA-256 is not that of the manifest)")
        return found

    def verify(self, level: Literal["size", "full"] = "full") -> None:
        """Raises CheckpointError naming each missing or damaged file."""
        if found := self.problems(level):
            raise CheckpointError(f"{self.path} is damaged: {'; '.join(found)}")

    def unlisted(self) -> list[str]:
        """Files in the folder that the manifest does not know. Nothing here reads them."""
        present = {p.relative_to(self.path).as_posix() for p in self.path.rglob("*") if p.is_file()}
        return sorted(present - set(self.manifest.files) - {MANIFEST})


def publish_latest(root: str | Path, name: str) -> None:
    """Makes ``root/latest`` name the finished checkpoint ``name``."""
    read_manifest(Path(root) / safe_name(name))
    write_pointer(Path(root) / LATEST, name)
