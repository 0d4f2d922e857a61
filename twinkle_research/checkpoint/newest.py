"""Which checkpoint of a run to continue from. Read-only, so it can run beside a run that is saving."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal

from twinkle_research.checkpoint.format import CheckpointReader
from twinkle_research.checkpoint.manifest import Manifest, manifests
from twinkle_research.checkpoint.names import LATEST, MANIFEST, REPLACED, TMP, TRAINER_STATE, UnsafeCheckpoint, safe_name, step_of
from twinkle_research.errors import CheckpointError

log = logging.getLogger(__name__)

FOLDER = "checkpoints"
# Up to this size a checkpoint is hashed before it is used (about 0.7 s a GB); a larger one is checked by its sizes
# and headers, and `python -m twinkle_research.checkpoint verify` hashes it.
FULL_VERIFY_BYTES = 20_000_000_000

Level = Literal["auto", "size", "full"]


def newest_checkpoint(path: str | Path, verify: Level = "auto") -> Path | None:
    """The checkpoint to continue from at ``path``: a checkpoint itself, a run folder, or a folder of checkpoints.

    That is the one that the ``latest`` pointer names, if it is whole, else the newest whole one. Unfinished and damaged
    ones that are passed over are named in warnings. None where no save was ever finished. Raises CheckpointError where
    some were finished and all are damaged, UnsafeCheckpoint where one holds something that could run code.
    """
    path = Path(path)
    if (path / MANIFEST).exists():
        check(path, verify)
        return path
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder; expected a checkpoint, a run folder or a folder of checkpoints")
    root = path / FOLDER if (path / FOLDER).is_dir() else path
    candidates = _newest_first(root)
    pointed = _pointed(root, candidates)
    problems: dict[Path, str] = {}
    for candidate in sorted(candidates, key=lambda c: c != pointed):
        problem = _problem(candidate, verify)
        if problem is None:
            _warn(candidates, candidate, problems)
            return candidate
        problems[candidate] = problem
    finished = [problem for candidate, problem in problems.items() if not candidate.name.endswith(TMP)]
    if finished:
        reasons = "; ".join(finished)
        raise CheckpointError(f"no whole checkpoint is left: {reasons}. Restore one, or remove {root} to start again.")
    _warn(candidates, None, problems)
    return None


def check(path: Path, verify: Level = "auto") -> None:
    """Raises CheckpointError unless a run can continue from the checkpoint ``path``."""
    reader = CheckpointReader(path)
    level = verify
    if level == "auto":
        level = "full" if reader.manifest.total_bytes <= FULL_VERIFY_BYTES else "size"
    reader.verify(level)
    if not reader.has(TRAINER_STATE):
        raise CheckpointError(f"{path} has no {TRAINER_STATE}: a run cannot continue from it")
    reader.json(TRAINER_STATE)


def _problem(path: Path, verify: Level) -> str | None:
    if path.name.endswith(TMP):
        return f"{path} is not finished (the run was stopped while it saved, or is saving now)"
    try:
        check(path, verify)
    except UnsafeCheckpoint:
        raise
    except CheckpointError as error:
        return str(error)
    return None


def _warn(candidates: list[Path], chosen: Path | None, problems: dict[Path, str]) -> None:
    """Names what is newer than ``chosen`` and why it was passed over."""
    for candidate in candidates:
        if candidate == chosen:
            break
        if candidate not in problems:  # 'latest' named an older one
            problems[candidate] = _problem(candidate, "size") or f"{candidate} is newer, but 'latest' does not name it"
    for problem in problems.values():
        log.warning("%s; %s", problem, f"{chosen.name} is used instead" if chosen else "there is no earlier one")


def _pointed(root: Path, candidates: list[Path]) -> Path | None:
    """What the pointer file names, whether or not it is whole."""
    pointer = root / LATEST
    if not pointer.is_file():
        return None
    try:
        name = safe_name(pointer.read_bytes()[:1000].decode(errors="replace").strip())
    except UnsafeCheckpoint:  # empty after a power loss, or not ours: nothing that it says is followed
        log.warning("%s does not hold the name of a checkpoint and is not followed", pointer)
        return None
    for candidate in candidates:
        if candidate.name in (name, name + REPLACED):
            return candidate
    log.warning("%s names %s, which is not there", pointer, name)
    return None


def _newest_first(root: Path) -> list[Path]:
    """Folders named like the checkpoint of a step, finished or not, the last saved first."""
    known = manifests(root)
    found: list[tuple[Manifest | None, int, Path]] = []
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        name = path.name.removesuffix(TMP).removesuffix(REPLACED)
        step = step_of(name)
        if step is None or not path.is_dir() or (path.name.endswith(REPLACED) and (root / name).exists()):
            continue
        found.append((None if path.name.endswith(TMP) else known.get(path.name), step, path))

    def rank(entry: tuple[Manifest | None, int, Path]) -> tuple[int, int]:
        manifest, step, _ = entry
        if manifest is not None:
            return manifest.sequence, 0
        # Without a manifest there is no sequence number: it counts as saved right after the last one of its step or before.
        return max((m.sequence for m, s, _ in found if m is not None and s <= step), default=0), 1

    return [path for _, _, path in sorted(found, key=rank, reverse=True)]
