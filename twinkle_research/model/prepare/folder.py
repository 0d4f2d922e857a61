"""Model folders: shipped models are prepared once and cached; paths and hub ids are found.

No torch at import: the run plan and its checks use this module too.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from twinkle_research.cachefolder import cache_root
from twinkle_research.durable import fsync_path
from twinkle_research.errors import ConfigError, UserError, nearest
from twinkle_research.model.config import DType, ModelConfig, ModelSource
from twinkle_research.model.facts import Facts, read_facts
from twinkle_research.model.prepare import smollm2, tiny, tiny_sums

_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model", "*.tiktoken"]
_CACHE_HINT = "the environment variable TWINKLE_CACHE names another place for prepared models"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


@dataclass(frozen=True)
class Recipe:
    """How a shipped model is made: ``write(folder, dtype)``; ``source_id()`` names what it is made from."""

    write: Callable[[Path, DType], None]
    source_id: Callable[[], str]
    dtype: DType  # what the folder holds unless asked otherwise


RECIPES = {
    ModelSource.tiny: Recipe(tiny.write, lambda: "seeded", DType.float32),
    ModelSource.tiny_sums: Recipe(tiny_sums.write, tiny_sums.source_id, DType.bfloat16),
    ModelSource.smollm2_135m: Recipe(smollm2.write, smollm2.source_id, DType.bfloat16),
}


def prepare(name: str | ModelSource, out: str | Path | None = None, dtype: str | DType | None = None) -> Path:
    """Writes a shipped model as a Hugging Face folder and returns the folder.

    Without ``out`` the folder lies in the cache ($TWINKLE_CACHE, else ~/.cache/twinkle_research) and is made only
    once, whatever number of processes ask at once. ``out`` must not exist or be empty. ``dtype`` defaults to the
    recipe's: float32 for tiny, else bfloat16. Raises ConfigError for an unknown name.
    """
    source, recipe = _recipe(name)
    kind = _dtype(dtype) if dtype is not None else recipe.dtype
    if out is not None:
        target = Path(out).expanduser().resolve()
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise ConfigError(f"out={out}: exists and is not an empty folder")
        _write_atomically(recipe, kind, target)
        return target
    target = cache_root() / "models" / f"{source.value}-{_digest(recipe, kind)}"
    if target.is_dir():
        return target
    with _lock(target):
        if not target.is_dir():
            _write_atomically(recipe, kind, target)
    return target


def resolve_model_folder(model: ModelConfig, *, download: bool = True) -> Path:
    """The Hugging Face folder of a model config: ``path`` (folder or hub id) before what its option stands for.

    A hub id is downloaded into Hugging Face's cache (with ``download=False`` only looked up there). Raises
    ConfigError for a path that is not a model and UserError when the hub cannot be reached.
    """
    if model.path is not None:
        folder = _local_folder(model.path)
        return folder if folder is not None else _hub_folder(model, download)
    if model.hub_id is not None and model.source is None:
        return _hub_folder(model, download)
    if model.source is None:
        raise ConfigError(f"model.path: needed with model={model.name}, which has no source of its own (folder or hub id)")
    return prepare(model.source)


def model_facts(model: ModelConfig) -> Facts | None:
    """Facts for the plan, without preparing or downloading anything; None for a hub id not yet downloaded, of which no option
    has the facts."""
    if model.path is None and model.architecture is not None:
        return read_facts(model.architecture)
    folder = _local_folder(model.path) if model.path is not None else None
    if folder is None and model.path is not None:
        folder = _cached_hub_folder(model)
    return read_facts(folder) if folder is not None else None


# --- shipped models -------------------------------------------------------------------------------------------------


def _recipe(name: str | ModelSource) -> tuple[ModelSource, Recipe]:
    value = name.value if isinstance(name, ModelSource) else name
    if value not in ModelSource.__members__:
        raise ConfigError(f"model={value}: not a model that can be prepared; {nearest(value, ModelSource.__members__)}")
    source = ModelSource(value)
    return source, RECIPES[source]


def _dtype(value: str | DType) -> DType:
    if isinstance(value, DType):
        return value
    if value not in DType.__members__:
        raise ConfigError(f"dtype={value}: {nearest(value, DType.__members__)}")
    return DType(value)


def _digest(recipe: Recipe, dtype: DType) -> str:
    """Names the content: the code that writes it, what it is made from, the dtype. A changed recipe is a new folder."""
    digest = hashlib.sha256(f"{recipe.source_id()}\n{dtype.value}\n".encode())
    for file in sorted(Path(__file__).parent.glob("*.py")):
        if file.name not in ("__init__.py", "folder.py"):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def _write_atomically(recipe: Recipe, dtype: DType, target: Path) -> None:
    """Writes beside ``target`` and renames, so that a folder under its final name is always whole."""
    partial = target.with_name(f"{target.name}.tmp-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"cannot write {partial}: {error.strerror} ({_CACHE_HINT})") from None
    try:
        recipe.write(partial, dtype)
        mode = (partial / "config.json").stat().st_mode
        for file in partial.iterdir():
            file.chmod(mode)  # safetensors writes for the owner alone; a shared cache needs the usual mode
            fsync_path(file)
        if target.is_dir() and not any(target.iterdir()):
            target.rmdir()
        partial.rename(target)
        fsync_path(target.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def _lock(target: Path) -> Iterator[None]:
    """One process at a time; the lock ends with its holder, so a killed one leaves nothing behind but partial files."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        file = target.with_name(f"{target.name}.lock").open("w")
    except OSError as error:
        raise UserError(f"cannot write the model cache {target.parent}: {error.strerror} ({_CACHE_HINT})") from None
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for stale in target.parent.glob(f"{target.name}.tmp-*"):
            shutil.rmtree(stale, ignore_errors=True)
        yield


# --- folders and hub ids --------------------------------------------------------------------------------------------


def _local_folder(path: str) -> Path | None:
    """The folder that ``path`` names, None if it is a hub id; ConfigError if it is neither."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            hint = "; it holds a PEFT adapter: merge it first" if (folder / "adapter_config.json").is_file() else ""
            raise ConfigError(f"model.path={path}: the folder has no config.json{hint}")
        return folder.resolve()
    if folder.exists():
        raise ConfigError(f"model.path={path}: expected a folder or a hub id, this is a file")
    if path.startswith("ms://"):
        raise ConfigError(f"model.path={path}: download it with the modelscope package and give the folder")
    if path.startswith(("/", ".", "~")) or not _HUB_ID.fullmatch(path.removeprefix("hf://")):
        siblings = [p.name for p in folder.parent.iterdir() if p.is_dir()] if folder.parent.is_dir() else []
        hint = nearest(folder.name, siblings)
        near = f"; {hint}" if hint.startswith("did you mean") else ""
        raise ConfigError(f"model.path={path}: no such folder{near}")
    if path in ModelSource.__members__:
        raise ConfigError(f"model.path={path}: not a folder; the shipped model is chosen by model={path}")
    return None


def _hub_patterns(model: ModelConfig) -> list[str]:
    return [*_HUB_FILES, "*.py"] if model.trust_remote_code else _HUB_FILES


def _hub_folder(model: ModelConfig, download: bool) -> Path:
    cached = _cached_hub_folder(model)
    if cached is not None:
        return cached
    if not download:
        raise UserError(f"{_named(model)}: not in the local Hugging Face cache")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    hub_id = _hub_id(model)
    try:
        return Path(snapshot_download(hub_id, revision=model.revision, allow_patterns=_hub_patterns(model)))
    except RepositoryNotFoundError:
        raise ConfigError(f"{_named(model)}: neither a folder here nor a model on the hub") from None
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{_named(model)}: not a folder here, and the hub does not give it ({reason})") from None


def _hub_id(model: ModelConfig) -> str:
    return (model.path or model.hub_id).removeprefix("hf://")


def _named(model: ModelConfig) -> str:
    return f"model.path={model.path}" if model.path is not None else f"model={model.name} ({model.hub_id})"


def _cached_hub_folder(model: ModelConfig) -> Path | None:
    """The snapshot in the local cache whose weights are all there."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(_hub_id(model), "config.json", revision=model.revision)
    if not isinstance(config, str):
        return None
    folder = Path(config).parent
    try:
        read_facts(folder)
    except ConfigError:
        return None  # an interrupted download: the weights are not all there
    return folder
