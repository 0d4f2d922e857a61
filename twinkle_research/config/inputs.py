"""Stage 2 of validation: what the config says about files and models, checked against them. Reads headers only, no torch."""

import difflib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from omegaconf import OmegaConf

from twinkle_research.config.schema import config_dir
from twinkle_research.errors import ConfigError
from twinkle_research.model.config import LoraAdapterConfig, ModelConfig
from twinkle_research.model.facts import Facts
from twinkle_research.model.prepare import model_facts
from twinkle_research.tracking.credentials import resolve_mode
from twinkle_research.trainer.config import TrainConfig

DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")


def stage_2(config: TrainConfig) -> Iterator[str]:
    yield from _paths(config)
    yield from _wandb(config)
    yield from _shipped_facts(config.model)
    try:
        facts = model_facts(config.model)
    except ConfigError as error:
        yield str(error)
        return
    if facts is not None:
        yield from _against_model(config, facts)


def _wandb(config: TrainConfig) -> Iterator[str]:
    try:
        resolve_mode(config.tracking.wandb)
    except ConfigError as error:
        yield str(error)


def _paths(config: TrainConfig) -> Iterator[str]:
    for key in ("path", "eval_path"):
        value = getattr(config.data, key)
        if value is not None:
            yield from _data_path(f"data.{key}", value)


def _data_path(key: str, value: str) -> Iterator[str]:
    path = Path(value).expanduser()
    if path.is_dir():
        if not any(file.suffix in DATA_SUFFIXES for file in path.iterdir()):
            yield f"{key}={value}: the folder has no file ending in {', '.join(DATA_SUFFIXES)}"
    elif not path.exists():
        names = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
        close = difflib.get_close_matches(path.name, names, n=1, cutoff=0.6)
        yield f"{key}={value}: no such file" + (f"; did you mean '{path.parent / close[0]}'?" if close else "")
    elif path.suffix not in DATA_SUFFIXES:
        yield f"{key}={value}: cannot read '{path.suffix or path.name}' files; it must end in {', '.join(DATA_SUFFIXES)}"


def _shipped_facts(model: ModelConfig) -> Iterator[str]:
    """``source`` and ``architecture`` describe what the option prepares; changing them would only change the plan."""
    facts = _facts_in_option(model.name)
    if facts is None:
        return
    source, architecture = facts
    if model.source is not source:
        yield f"'model.source' cannot be set: it says what model={model.name} prepares"
    if model.architecture != architecture:
        yield f"'model.architecture' cannot be set: it describes model={model.name}; for another model give model.path"


@cache
def _facts_in_option(name: str) -> tuple[object, object] | None:
    path = config_dir() / "model" / f"{name}.yaml"
    if not path.is_file():
        return None
    stored = OmegaConf.load(path)
    if "source" not in stored or "architecture" not in stored:
        return None
    model = OmegaConf.structured(ModelConfig(name=name))
    model = OmegaConf.merge(model, {"source": stored.source, "architecture": stored.architecture})
    architecture = model.architecture
    return model.source, None if architecture is None else OmegaConf.to_object(architecture)


def _against_model(config: TrainConfig, facts: Facts) -> Iterator[str]:
    model = config.model.path or f"model={config.model.name}"
    if facts.max_positions and config.data.max_length > facts.max_positions:
        yield f"data.max_length={config.data.max_length} is more than the {facts.max_positions} positions of {model}"
    if isinstance(config.adapter, LoraAdapterConfig):
        for key in ("target_modules", "modules_to_save"):
            for name in facts.unknown_modules(getattr(config.adapter, key)):
                yield f"'adapter.{key}' names '{name}', which {model} does not have; {facts.hint(name)}"
