"""Stage 2 of validation: what the config says about files and models, checked against them. Reads headers only, no torch."""

import inspect
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from omegaconf import OmegaConf

from twinkle_research import template
from twinkle_research.config.megatronchecks import megatron_against_model, megatron_installed, megatron_on_processes
from twinkle_research.config.rewardchecks import reward_files
from twinkle_research.config.samplerchecks import sampler_against_model, sampler_installed
from twinkle_research.config.schema import config_dir
from twinkle_research.dataset import preprocessor
from twinkle_research.dataset.config import CommonDataConfig, DataConfig, eval_path_of, sources_of
from twinkle_research.dataset.reader import data_files
from twinkle_research.errors import ConfigError, DataError, nearest
from twinkle_research.model.config import LoraAdapterConfig, ModelConfig
from twinkle_research.model.facts import Facts
from twinkle_research.model.prepare import model_facts
from twinkle_research.tracking.credentials import resolve_mode
from twinkle_research.trainer.config import TrainConfig

# Last name parts of the two modules that share one weight in a model with tied embeddings.
_SHARED = ("embed_tokens", "wte", "word_embeddings", "embed_in", "tok_embeddings", "lm_head", "embed_out", "output_layer")
_QUICKLY_COUNTED = 50_000_000  # bytes
TEMPLATES = [name for name in template.__all__ if name[0].isupper()]


def stage_2(config: TrainConfig) -> Iterator[str]:
    yield from _paths(config)
    yield from _held_out(config.data)
    yield from _classes(config.data)
    yield from reward_files(config)
    yield from _wandb(config)
    yield from sampler_installed(config)
    yield from megatron_installed(config)
    yield from _shipped_facts(config.model)
    try:
        facts = model_facts(config.model)
    except ConfigError as error:
        yield str(error)
        return
    if facts is not None:
        yield from against_model(config, facts)


def _wandb(config: TrainConfig) -> Iterator[str]:
    try:
        resolve_mode(config.tracking.wandb)
    except ConfigError as error:
        yield str(error)


def _paths(config: TrainConfig) -> Iterator[str]:
    paths = {f"{key}.path": source.path for key, source in sources_of(config.data)}
    paths["data.eval_path"] = eval_path_of(config.data)
    for key, value in paths.items():
        if value is not None:
            try:
                data_files(Path(value).expanduser())
            except DataError as error:
                yield f"{key}: {error}"


def _held_out(data: CommonDataConfig) -> Iterator[str]:
    """Where counting the rows is cheap: JSON lines that are not changed by a processor."""
    if not isinstance(data, DataConfig) or not data.eval_rows or data.path is None or data.processor is not None:
        return
    path = Path(data.path).expanduser()
    if path.suffix.lower() not in (".jsonl", ".ndjson") or not path.is_file() or path.stat().st_size > _QUICKLY_COUNTED:
        return
    with path.open("rb") as file:
        rows = sum(bool(line.strip()) for line in file)
    if data.eval_rows >= rows:
        yield f"data.eval_rows={data.eval_rows} leaves no row to train on: {path} has {rows} rows"


def _classes(data: CommonDataConfig) -> Iterator[str]:
    """Names of built-in classes and their arguments. A dotted path is somebody's code: it is imported when it is used."""
    if "." not in data.template and data.template not in TEMPLATES:
        yield f"data.template={data.template} is no class of twinkle_research.template; {nearest(data.template, TEMPLATES)}"
    for key, source in sources_of(data):
        if source.processor is None or "." in source.processor:
            continue
        if source.processor not in preprocessor.__all__:
            near = nearest(source.processor, preprocessor.__all__)
            yield f"{key}.processor={source.processor} is no class of twinkle_research.dataset.preprocessor; {near}"
            continue
        takes = inspect.signature(getattr(preprocessor, source.processor)).parameters
        for name in source.processor_args:
            if name not in takes:
                yield f"unknown key '{key}.processor_args.{name}'; {nearest(name, takes)}"


def _shipped_facts(model: ModelConfig) -> Iterator[str]:
    """``source``, ``hub_id`` and ``architecture`` describe what the option stands for; they cannot be changed."""
    facts = _facts_in_option(model.name)
    if facts is None:
        return
    source, hub_id, architecture = facts
    if model.hub_id != hub_id:
        yield f"'model.hub_id' cannot be set: it says what model={model.name} is; for another model give model.path"
    if model.source is not source:
        yield f"'model.source' cannot be set: it says what model={model.name} prepares"
    if model.architecture != architecture:
        yield f"'model.architecture' cannot be set: it describes model={model.name}; for another model give model.path"


@cache
def _facts_in_option(name: str) -> tuple[object, object, object] | None:
    path = config_dir() / "model" / f"{name}.yaml"
    if not path.is_file():
        return None
    stored = OmegaConf.load(path)
    if "source" not in stored or "architecture" not in stored:
        return None
    model = OmegaConf.structured(ModelConfig(name=name))
    model = OmegaConf.merge(model, {key: stored.get(key) for key in ("source", "hub_id", "architecture")})
    architecture = model.architecture
    return model.source, model.hub_id, None if architecture is None else OmegaConf.to_object(architecture)


def against_model(config: TrainConfig, facts: Facts) -> Iterator[str]:
    """What the model does not have or cannot do. A model from a hub is looked at when it is here."""
    model = config.model.path or f"model={config.model.name}"
    if facts.max_positions and config.data.max_length > facts.max_positions:
        yield f"data.max_length={config.data.max_length} is more than the {facts.max_positions} positions of {model}"
    if isinstance(config.adapter, LoraAdapterConfig):
        for key in ("target_modules", "modules_to_save"):
            for name in facts.unknown_modules(getattr(config.adapter, key)):
                near = facts.hint(name) if key == "target_modules" else nearest(name, sorted(map(_last, facts.modules)))
                yield f"'adapter.{key}' names '{name}', which {model} does not have; {near}"
        yield from _low_rank_on_tied(config.adapter, facts)
    yield from sampler_against_model(config, facts)
    if problems := list(megatron_against_model(config, facts)):
        yield from problems
    else:
        yield from megatron_on_processes(config, facts)


def _low_rank_on_tied(adapter: LoraAdapterConfig, facts: Facts) -> Iterator[str]:
    """As model/lora_config.py, which knows it from the model itself."""
    tied = [name for name in facts.modules if facts.tied_embeddings and _last(name) in _SHARED]
    for name in tied:
        if any(name in facts.matching(target) for target in adapter.target_modules):
            yield (
                f"'adapter.target_modules': {' and '.join(sorted(tied))} share one weight in this model, so a low-rank change "
                f"of {name} would untie them; train them in full with adapter.modules_to_save=[{_last(name)}]"
            )


def _last(module: str) -> str:
    return module.rpartition(".")[2]
