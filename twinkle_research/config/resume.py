"""Continuing a run: which settings may differ from those that its folder was made with (CONTRACTS 5)."""

import dataclasses
import difflib
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

from twinkle_research.config.storage import FILE_NAME, load_config
from twinkle_research.errors import ConfigError
from twinkle_research.trainer.config import TrainConfig

# What computes, on how many processes, cut how, and what is shown and kept: none of it changes the result.
_FREE = (
    "run_dir", "resume", "dry_run", "eval_only", "backend", "launch", "tracking", "checkpoint", "model.attention",
    "trainer.micro_batch_size", "trainer.micro_batch_tokens", "data.packing", "data.num_proc", "data.preview", "data.on_change",
    "data.cache", "data.cache_dir", "reward.workers",
    "sampler.max_rows", "sampler.max_num_seqs", "sampler.tensor_parallel", "sampler.gpu_memory_utilization",
    "sampler.kv_cache_gib", "sampler.enforce_eager", "sampler.sleep", "sampler.canary",
)  # fmt: skip
_UPWARD = ("trainer.max_steps", "trainer.epochs")


def diff(old: TrainConfig, new: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """Dotted key -> (old, new) of every setting that differs. An option with other settings gives each of them."""
    before, after = _flat(old), _flat(new)
    keys = [*before, *(key for key in after if key not in before)]
    return {key: (before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)}


def resumable_changes(changes: dict[str, tuple[Any, Any]]) -> set[str]:
    """Those of the changed keys that a run may be continued with."""
    return {key for key, (old, new) in changes.items() if is_free(key) or (key in _UPWARD and _is_upward(old, new))}


def check_resume(old: TrainConfig, new: TrainConfig) -> None:
    """Raises ConfigError naming each changed key with which the run cannot be continued."""
    changes = diff(old, new)
    refused = [key for key in changes if key not in resumable_changes(changes)]
    other_option = {key.partition(".")[0] for key in refused if key.endswith(".name") and key.count(".") == 1}
    refused = [key for key in refused if key.partition(".")[0] not in other_option or key.endswith(".name")]
    if refused:
        lines = [f"'{key}' was {show(changes[key][0])}, is now {show(changes[key][1])}{_advice(key)}" for key in refused]
        where = f"run_dir={new.run_dir}" if new.run_dir else "the run folder"
        raise ConfigError(f"{where} holds a run with other settings; give the old ones, or a new run_dir\n" + "\n".join(lines))


def problems_of_run_folder(config: TrainConfig) -> Iterator[str]:
    """What forbids to start in (or continue, or evaluate) ``run_dir``. Only reads."""
    yield from _problems_of_resume(config.resume)
    if config.run_dir is None:
        return
    folder = Path(config.run_dir)
    if folder.exists() and not folder.is_dir():
        yield f"run_dir={folder} is a file, not a folder"
    elif not (folder / FILE_NAME).is_file():
        if config.eval_only and config.resume == "auto":
            yield f"eval_only=true: run_dir={folder} holds no run"
    elif config.resume == "never":
        yield f"run_dir={folder} holds a run already and resume=never; give another run_dir, or resume=auto to continue"
    elif config.eval_only:
        yield from _other_weights(diff(load_config(folder), config), folder)
    else:
        check_resume(load_config(folder), config)


def _other_weights(changes: dict[str, tuple[Any, Any]], folder: Path) -> Iterator[str]:
    """An evaluation may read other rows in another way, but of the weights that are there."""
    for key in ("model.name", "model.path", "adapter.name", "adapter.r", "adapter.target_modules", "adapter.modules_to_save"):
        if key in changes:
            old, new = map(show, changes[key])
            yield f"eval_only=true: the run in {folder} has '{key}' {old}, not {new}"


def _problems_of_resume(resume: str) -> Iterator[str]:
    if resume in ("auto", "never") or Path(resume).is_dir():
        return
    close = difflib.get_close_matches(resume, ["auto", "never"], n=1, cutoff=0.6)
    meant = f"did you mean '{close[0]}'?" if close else "there is no such folder."
    yield f"resume={resume}: {meant} It must be auto, never or the folder of a checkpoint or of a run"


def _flat(node: Any, prefix: str = "") -> dict[str, Any]:
    values = {}
    for field in dataclasses.fields(node):
        value = getattr(node, field.name)
        if dataclasses.is_dataclass(value):
            values |= _flat(value, f"{prefix}{field.name}.")
        elif isinstance(value, list) and any(map(dataclasses.is_dataclass, value)):
            for number, item in enumerate(value):
                values |= _flat(item, f"{prefix}{field.name}[{number}].")
        else:
            values[prefix + field.name] = value
    return values


def is_free(key: str) -> bool:
    return any(key == free or key.startswith(free + ".") for free in _FREE)


def _is_upward(old: int | None, new: int | None) -> bool:
    """null hands the end over to the other setting, which is then judged; the trainer never goes back in any case."""
    return old is None or new is None or new > old


def show(value: Any) -> str:
    if isinstance(value, Enum):
        return value.name
    return "null" if value is None else str(value)


def _advice(key: str) -> str:
    return " (it may only grow)" if key in _UPWARD else ""
