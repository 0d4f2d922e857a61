"""A folder of a sweep that is given again: jobs that have run keep the settings that they have run with."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from omegaconf import DictConfig

from twinkle_research.config.resume import check_resume
from twinkle_research.config.storage import FILE_NAME, load_config, to_object
from twinkle_research.errors import ConfigError
from twinkle_research.sweep.folder import SWEEP, Sweep, SweepJob
from twinkle_research.sweep.job import CONFIG
from twinkle_research.trainer.rundir import STATES as RUN_STATES
from twinkle_research.trainer.rundir import RunFolder


def check_folder(path: Path) -> None:
    """Raises ConfigError where the folder of a sweep can neither be found nor be made, or is not its own. Leaves nothing
    behind."""
    path = path.absolute()
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    existing = missing[-1].parent if missing else path
    if not existing.is_dir():
        raise ConfigError(f"hydra.sweep.dir={path}: {existing} is a file, not a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"hydra.sweep.dir={path}: {existing} cannot be written to")
    refuse_inside(path)
    made = []
    try:
        for folder in reversed(missing):
            folder.mkdir()
            made.append(folder)
    except FileExistsError:  # another process has just made it
        pass
    except OSError as error:
        raise ConfigError(f"hydra.sweep.dir={path} cannot be made: {error.strerror} ({error.filename})") from error
    finally:
        for folder in reversed(made):
            try:
                folder.rmdir()
            except OSError:  # another process has put something there
                break


def refuse_inside(path: Path) -> None:
    """Raises ConfigError where the folder of a sweep would be, or be part of, that of a run or of another sweep."""
    path = path.resolve()
    for folder in filter(Path.is_dir, (path, *path.parents)):
        if RunFolder(folder).read_status().get("state") in RUN_STATES:
            raise ConfigError(f"hydra.sweep.dir={path}: {folder} is the folder of a run; give one that is in no run's")
        if folder != path and (folder / SWEEP).is_file():
            raise ConfigError(f"hydra.sweep.dir={path}: {folder} is the folder of another sweep; give one beside it")


def check_same_jobs(
    sweep: Sweep, numbered: Sequence[tuple[int, list[str]]], compose: Callable[[SweepJob, Path], DictConfig]
) -> None:
    """Raises ConfigError where other words than its own are given for a job that has run (or waits in a queue), unless its run
    can be continued with them."""
    for number, words in numbered:
        old = sweep.jobs.get(number)
        if old is None or old.overrides == words:
            continue
        stored = sweep.folder(number).path / FILE_NAME
        if not stored.is_file() and old.cluster_id and old.state in ("waiting", "running"):
            stored = stored.with_name(CONFIG)
        if not stored.is_file():
            continue
        new = to_object(compose(SweepJob(number, words), sweep.path))
        try:
            check_resume(load_config(stored), new)
        except ConfigError as error:
            _, _, settings = str(error).partition("\n")
            raise ConfigError(
                f"{sweep.path} holds job {number} with {' '.join(old.overrides)}, not {' '.join(words)}: give those, or another "
                f"hydra.sweep.dir\n{settings or error}"
            ) from error
