"""Names in and around checkpoints. A name from a user, a manifest, an index or a URL never leads out of its folder."""

from __future__ import annotations

import re
from pathlib import Path

from twinkle_research.errors import CheckpointError

MANIFEST = "manifest.json"
TRAINER_STATE = "trainer_state.json"
LATEST = "latest"  # pointer files beside the checkpoints: one line, the name of a checkpoint
BEST = "best"
PARTS = ".parts.json"  # behind the name of a set of tensors: which file has which part of each

TMP = ".tmp"  # being written
REPLACED = ".replaced"  # complete, about to be replaced by a new save of the same name
TRASH = ".trash"  # being deleted
RESERVED_SUFFIXES = (TMP, REPLACED, TRASH)

# Formats that run code when they are read. They are never opened, whatever asks for them.
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._ +=@-]{0,199}")
_STEP = re.compile(r"step-([0-9]{6,})")


class UnsafeCheckpoint(CheckpointError):
    """A checkpoint holds something that could run code or reach outside its folder. Nothing of it was read."""


def step_name(step: int) -> str:
    """Folder name of the checkpoint of optimizer step ``step``: ``step-000010``."""
    return f"step-{step:06d}"


def step_of(name: str) -> int | None:
    """The step that a folder name stands for; None for any other name (``step-000010.tmp`` included)."""
    match = _STEP.fullmatch(name)
    return int(match.group(1)) if match else None


def safe_name(name: object) -> str:
    """Returns ``name`` if it may name a checkpoint, else raises CheckpointError.

    Letters, digits, ``.``, ``_`` and ``-``, at most 128 characters, starting with a letter or digit. So no separator,
    no ``..``, no drive, no escape and nothing that this package uses itself.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise CheckpointError(
            f"checkpoint name {_shown(name)} is refused: expected 1 to 128 letters, digits, '.', '_' or '-', "
            "starting with a letter or digit (such as 'step-000010')"
        )
    if name in (LATEST, BEST) or name.endswith(RESERVED_SUFFIXES):
        raise CheckpointError(f"checkpoint name {_shown(name)} is refused: '{LATEST}', '{BEST}' and the endings "
                              f"{', '.join(RESERVED_SUFFIXES)} are used by the program itself")  # fmt: skip
    return name


def safe_relative(name: object, where: str) -> str:
    """Returns ``name`` if it is a plain relative file name such as ``model/config.json``; ``where`` says who gave it."""
    parts = name.split("/") if isinstance(name, str) else []
    if not parts or len(parts) > 8 or not all(_PART.fullmatch(part) for part in parts):
        raise UnsafeCheckpoint(f"{where}: file name {_shown(name)} is refused: it is not a plain name inside the folder")
    return "/".join(parts)


def refuse_pickle(name: str, where: str) -> None:
    """Raises UnsafeCheckpoint where ``name`` has a format that can run code when it is read."""
    if name.lower().endswith(PICKLE_SUFFIXES):
        raise UnsafeCheckpoint(
            f"{where}: '{name}' is refused: pickle files can run code when they are read, and none is ever opened. "
            "Tensors are read from .safetensors files only."
        )


def resolve_inside(root: Path, name: str, where: str) -> Path:
    """``root/name`` for a relative ``name``, refusing every symbolic link on the way from ``root``."""
    path = root
    for part in safe_relative(name, where).split("/"):
        path = path / part
        if path.is_symlink():
            raise UnsafeCheckpoint(f"{where}: '{name}' is refused: {path} is a symbolic link")
    return path


def _shown(name: object) -> str:
    text = repr(name)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"
