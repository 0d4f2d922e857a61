"""The stored configuration of a run: ``<run_dir>/config.yaml``."""

from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from twinkle_research.config.schema import GROUPS, SCHEMAS, find_schema, schema_of
from twinkle_research.errors import ConfigError, nearest
from twinkle_research.trainer.config import TrainConfig

FILE_NAME = "config.yaml"
_HEADER = """\
# The whole configuration of this run, defaults included. The same command with run_dir=<this folder> continues the run.
"""


def to_object(cfg: DictConfig) -> TrainConfig:
    """Real dataclasses in place of the DictConfig, interpolations resolved."""
    config = OmegaConf.to_object(cfg)
    if not isinstance(config, TrainConfig):
        raise TypeError(f"expected a composed train config, got {type(config).__name__}")
    return config


def save_config(cfg: DictConfig | TrainConfig, run_dir: str | Path, name: str = FILE_NAME) -> Path:
    """Writes ``config.yaml`` (or ``name``), resolved. ``schema:`` at its end says which dataclass types each section."""
    node = cfg if isinstance(cfg, DictConfig) else OmegaConf.structured(cfg)
    container = OmegaConf.to_container(node, resolve=True, enum_to_str=True)
    container["schema"] = {group: schema_of(group, OmegaConf.get_type(node, group)).name for group in GROUPS}
    path = Path(run_dir) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(name + ".tmp")
    partial.write_text(_HEADER + OmegaConf.to_yaml(OmegaConf.create(container)), encoding="utf-8")
    partial.replace(path)
    return path


def load_config(run_dir: str | Path) -> TrainConfig:
    """The typed configuration that ``save_config`` wrote (a folder, or the file itself)."""
    path = Path(run_dir)
    path = path / FILE_NAME if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(f"{path}: there is no {FILE_NAME}, so this is not the folder of a run")
    stored = _read(path)
    try:
        schemas = _section(stored, "schema", path)
        root = OmegaConf.structured(TrainConfig)
        for group in GROUPS:
            schema = find_schema(group, schemas.get(group, ""))
            if schema is None:
                valid = [s.name for s in SCHEMAS if s.group == group]
                raise ConfigError(
                    f"{path}: 'schema.{group}' is {schemas.get(group)!r}; {nearest(str(schemas.get(group)), valid)}"
                )
            root[group] = OmegaConf.structured(schema.node)
        OmegaConf.set_struct(root, True)
        for group in GROUPS:  # free-form dicts take any key, typed sections only their own
            root[group] = OmegaConf.merge(OmegaConf.structured(OmegaConf.get_type(root, group)), _section(stored, group, path))
        return to_object(OmegaConf.merge(root, stored))
    except (OmegaConfBaseException, KeyError) as error:
        raise ConfigError(f"{path}: {str(error).splitlines()[0]}") from error


def _read(path: Path) -> DictConfig:
    try:
        stored = OmegaConf.load(path)
    except (YAMLError, OmegaConfBaseException, ValueError, OSError) as error:
        said = " ".join(str(error).split())
        raise ConfigError(f"{path}: cannot be read as the configuration of a run: {said}") from error
    if not isinstance(stored, DictConfig):
        raise ConfigError(f"{path}: is not the configuration of a run: it holds a list, not settings")
    return stored


def _section(stored: DictConfig, name: str, path: Path) -> DictConfig:
    section = stored.pop(name, None)
    if not isinstance(section, DictConfig):
        raise ConfigError(f"{path}: is not the configuration of a run: the section '{name}' is missing or no section")
    return section
