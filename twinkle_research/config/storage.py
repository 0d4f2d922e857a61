"""The stored configuration of a run: ``<run_dir>/config.yaml``."""

from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from twinkle_research.config.schema import GROUPS, find_schema, schema_of
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


def save_config(cfg: DictConfig | TrainConfig, run_dir: str | Path) -> Path:
    """Writes ``config.yaml``, resolved. ``schema:`` at its end says which dataclass types each section."""
    node = cfg if isinstance(cfg, DictConfig) else OmegaConf.structured(cfg)
    container = OmegaConf.to_container(node, resolve=True, enum_to_str=True)
    container["schema"] = {group: schema_of(group, OmegaConf.get_type(node, group)).name for group in GROUPS}
    path = Path(run_dir) / FILE_NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(FILE_NAME + ".tmp")
    partial.write_text(_HEADER + OmegaConf.to_yaml(OmegaConf.create(container)), encoding="utf-8")
    partial.replace(path)
    return path


def load_config(run_dir: str | Path) -> TrainConfig:
    """The typed configuration that ``save_config`` wrote (a folder, or the file itself)."""
    path = Path(run_dir)
    path = path / FILE_NAME if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(f"{path}: there is no {FILE_NAME}, so this is not the folder of a run")
    try:
        stored = OmegaConf.load(path)
        schemas = stored.pop("schema", {})
        root = OmegaConf.structured(TrainConfig)
        for group in GROUPS:
            schema = find_schema(group, schemas.get(group, ""))
            if schema is None:
                valid = [s for s in schemas.values() if s]
                raise ConfigError(
                    f"{path}: 'schema.{group}' is {schemas.get(group)!r}; {nearest(str(schemas.get(group)), valid)}"
                )
            root[group] = OmegaConf.structured(schema.node)
        OmegaConf.set_struct(root, True)
        for group in GROUPS:  # free-form dicts take any key, typed sections only their own
            root[group] = OmegaConf.merge(OmegaConf.structured(OmegaConf.get_type(root, group)), stored.pop(group))
        return to_object(OmegaConf.merge(root, stored))
    except (OmegaConfBaseException, KeyError) as error:
        raise ConfigError(f"{path}: {str(error).splitlines()[0]}") from error
