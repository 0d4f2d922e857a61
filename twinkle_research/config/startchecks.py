"""A new run that starts from another run's state (``resume=<folder>``): what must be as it was there, and what differs."""

from collections.abc import Iterator
from pathlib import Path

from twinkle_research.config.resume import diff, is_free, show
from twinkle_research.config.storage import FILE_NAME, load_config
from twinkle_research.errors import CheckpointError, ConfigError
from twinkle_research.trainer.config import TrainConfig

# What decides the names and shapes of the tensors of an adapter.
_OF_ADAPTER = ("adapter.r", "adapter.target_modules", "adapter.modules_to_save", "adapter.dora")
_LIKE_ADAM = ("adam", "adamw")  # the same state


def problems_of_start(config: TrainConfig) -> Iterator[str]:
    """What forbids to start from ``resume``. Only reads headers."""
    if config.resume in ("auto", "never") or not Path(config.resume).is_dir():
        return
    if config.run_dir is not None and (Path(config.run_dir) / FILE_NAME).is_file():
        return  # a run that has begun continues from its own
    from twinkle_research.checkpoint.format import CheckpointReader
    from twinkle_research.checkpoint.newest import newest_checkpoint

    try:
        found = newest_checkpoint(config.resume, "size")
        reader = None if found is None else CheckpointReader(found)
    except CheckpointError as error:
        yield f"resume={config.resume}: {error}"
        return
    if reader is None:
        yield f"resume={config.resume}: there is no finished checkpoint in it"
        return
    lora = config.adapter.name != "none"
    if reader.has("adapter") and not lora:
        yield f"resume: {found} holds an adapter, but adapter=none; write adapter=lora"
    elif lora and not reader.has("adapter"):
        yield f"resume: {found} holds a whole model, but adapter={config.adapter.name}; write adapter=none"
    else:
        yield from _other_settings(config)
    end = config.trainer.max_steps
    if not config.eval_only and end is not None and reader.step >= end:
        yield f"resume: {found} is at step {reader.step} already, and trainer.max_steps={end} counts from the start: give more"


def _other_settings(config: TrainConfig) -> Iterator[str]:
    source = run_of(config.resume)
    if source is None:
        return
    old = load_config(source)
    changes = diff(old, config)
    for key in _OF_ADAPTER:
        if key in changes:
            yield f"resume: the run in {source} has '{key}' {show(changes[key][0])}, not {show(changes[key][1])}"
    names = old.optimizer.name, config.optimizer.name
    if not config.eval_only and names[0] != names[1] and not set(names) <= set(_LIKE_ADAM):
        yield (
            f"resume: the run in {source} has optimizer={names[0]}, whose state optimizer={names[1]} cannot continue. To start "
            "from its weights alone write them out (python -m twinkle_research.checkpoint to-hf <run> -o <folder>) and give "
            "model=hf model.path=<folder>"
        )


def run_of(place: str | Path) -> Path | None:
    """The run folder that ``place`` is, or is a checkpoint in; None where that is not known."""
    path = Path(place).resolve()
    return next((p for p in (path, *path.parents[:2]) if (p / FILE_NAME).is_file()), None)


def differences(place: str | Path, config: TrainConfig) -> list[str]:
    """As "key old -> new" each setting that counts and differs from those of the run that ``place`` belongs to."""
    source = run_of(place)
    if source is None:
        return []
    try:
        changes = diff(load_config(source), config)
    except ConfigError:  # of an older version: what cannot be compared is no reason not to start
        return []
    return [f"{key} {show(old)} -> {show(new)}" for key, (old, new) in changes.items() if not is_free(key)]
