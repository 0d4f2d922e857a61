"""The manifest of a checkpoint: what is in it, which run and step wrote it, and the hash of every file."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from twinkle_research.checkpoint.names import MANIFEST, refuse_pickle, resolve_inside, safe_relative
from twinkle_research.errors import CheckpointError

FORMAT = "twinkle_research.checkpoint"
FORMAT_VERSION = 1
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Manifest:
    """``sequence`` grows with every save into the same folder: the newest checkpoint has the largest, also where a
    run was taken back to an earlier step. ``metric``: the eval/loss at this step, if there was one."""

    step: int
    sequence: int
    backend: str
    layout: dict[str, Any]
    config_hash: str
    metric: float | None
    files: dict[str, dict[str, Any]]

    @property
    def total_bytes(self) -> int:
        return sum(entry["size"] for entry in self.files.values())

    def to_bytes(self) -> bytes:
        values = {"format": FORMAT, "format_version": FORMAT_VERSION, **asdict(self)}
        return (json.dumps(values, indent=1, allow_nan=False) + "\n").encode()


def read_manifest(folder: Path) -> Manifest:
    """Raises CheckpointError where ``folder`` has no whole manifest, UnsafeCheckpoint where it lists unsafe files."""
    where = resolve_inside(folder, MANIFEST, str(folder))
    try:
        values = json.loads(where.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        what = "is an unfinished save or not a checkpoint" if folder.is_dir() else "does not exist"
        raise CheckpointError(f"{folder} {what}: there is no {MANIFEST}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is damaged: {error}") from error
    if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
        raise CheckpointError(f"{where} is not a manifest of this program (expected format '{FORMAT}')")
    version = values.pop("format_version", None)
    if version != FORMAT_VERSION:
        raise CheckpointError(f"{where}: format version {version!r} is not known to this version (it reads {FORMAT_VERSION})")
    expected = {
        "step": int, "sequence": int, "backend": str, "layout": dict, "config_hash": str,
        "metric": (float, int, type(None)), "files": dict,
    }  # fmt: skip
    for key, kind in expected.items():
        if not isinstance(values.get(key, ...), kind):
            raise CheckpointError(f"{where} is damaged: '{key}' is missing or has the wrong type")
    _check_files(values["files"], where)
    return Manifest(**{key: values[key] for key in expected})


def _check_files(files: dict[str, Any], where: Path) -> None:
    if not files:
        raise CheckpointError(f"{where} is damaged: it lists no files")
    for name, entry in files.items():
        refuse_pickle(safe_relative(name, str(where)), str(where))
        size, digest = (entry.get("size"), entry.get("sha256")) if isinstance(entry, dict) else (None, None)
        if type(size) is not int or not isinstance(digest, str) or not _SHA256.fullmatch(digest):
            raise CheckpointError(f"{where} is damaged: entry of '{name}'")


def manifests(root: Path) -> dict[str, Manifest]:
    """Name -> manifest of every folder in ``root`` that has a readable one (its files are not looked at)."""
    found = {}
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        if path.is_dir() and not path.is_symlink() and (path / MANIFEST).is_file():
            try:
                found[path.name] = read_manifest(path)
            except CheckpointError:
                continue  # whoever wants to read that one is told; here it only does not count
    return found
