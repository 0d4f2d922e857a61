"""Strict composing: what Hydra would let pass (``+key``, typed-less options, missing values) is refused here.

Hydra's config loader is wrapped while our entry points run, so one check covers the command line, ``+`` and ``++``,
experiments, every YAML file, ``--cfg job`` and each job of a sweep.
"""

import contextlib
import copy
import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, Node, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from twinkle_research.config.explain import explain
from twinkle_research.config.keys import annotation_of, element_of, expected, is_list, is_optional, is_text, unknown_key
from twinkle_research.config.schema import BASE, GROUPS, config_dir, options, register
from twinkle_research.dataset.config import GSM8K_ID, GSM8K_SUBSET
from twinkle_research.errors import ConfigError
from twinkle_research.reward.config import PartName
from twinkle_research.sweep.config import register_sweeps
from twinkle_research.trainer.config import TrainConfig

BUILT_IN_ROWS = "builtin://"
# Rows, or completions; what conf/trainer/*.yaml promise where neither micro-batch setting is given.
DEFAULT_MICRO_BATCH = {"sft": 4, "rl": 16}


def compose(overrides: Sequence[str] = (), config_name: str = "train") -> DictConfig:
    """The checked config for these command-line words, interpolations resolved. Raises ConfigError."""
    known = HydraConfig.instance()
    before = known.cfg
    try:
        cfg = without_hydra(compose_with_hydra(overrides, config_name))
        OmegaConf.resolve(cfg)
    finally:
        known.cfg = before
    return cfg


def compose_with_hydra(overrides: Sequence[str] = (), config_name: str = "train") -> DictConfig:
    """As ``compose``, with the section ``hydra`` (mode, chosen options, overrides), which ``${hydra:...}`` then reads."""
    register()
    register_launchers()
    directory = str(config_dir())
    with strict_loader(), hydra.initialize_config_dir(version_base="1.3", config_dir=directory):
        cfg = hydra.compose(config_name, overrides=list(overrides), return_hydra_config=True)
    HydraConfig.instance().cfg = copy.copy(cfg)
    return cfg


@cache
def register_launchers() -> None:
    """Makes the launchers and sweepers known, once, in place of those that Hydra's plugins register when they are found."""
    Plugins.instance()
    register_sweeps()


def without_hydra(cfg: DictConfig) -> DictConfig:
    """``cfg`` itself, its section ``hydra`` taken out."""
    OmegaConf.set_struct(cfg, False)
    del cfg["hydra"]
    OmegaConf.set_struct(cfg, True)
    return cfg


@contextlib.contextmanager
def strict_loader(each_job: Callable[[DictConfig], object] | None = None) -> Iterator[None]:
    """Within it Hydra loads configs strictly and raises ConfigError, and schema names are not offered as options.

    ``each_job`` is called with each config of a single run, so that a sweep is checked whole before it starts.
    """
    load, list_options = ConfigLoaderImpl.load_configuration, ConfigLoaderImpl.get_group_options

    def strict_load(
        self: ConfigLoaderImpl, config_name: str | None, overrides: list[str], run_mode: RunMode, **kwargs: Any
    ) -> DictConfig:
        words = tidy(overrides, run_mode)
        try:
            cfg = load(self, config_name, _first_options(words), run_mode, **kwargs)
            if run_mode == RunMode.MULTIRUN:
                _keep_sweep(cfg, words)
        except (HydraException, OmegaConfBaseException, YAMLError) as error:
            raise ConfigError(explain(error, words)) from error
        except AssertionError as error:  # Hydra's, where a setting below a null section is given
            raise ConfigError(
                f"a setting lies below a section that is null under the chosen options: {' '.join(words)}"
            ) from error
        if config_name is None:
            return cfg  # Hydra's own, for its help
        with _hydra_resolver(cfg):
            check_tree(cfg, single_run=run_mode == RunMode.RUN)
        if each_job is not None and run_mode == RunMode.RUN:
            each_job(copy.deepcopy(cfg))
        return cfg

    def own_options(self: ConfigLoaderImpl, *args: Any, **kwargs: Any) -> list[str]:
        return [name for name in list_options(self, *args, **kwargs) if not name.startswith(BASE)]

    ConfigLoaderImpl.load_configuration, ConfigLoaderImpl.get_group_options = strict_load, own_options
    try:
        yield
    finally:
        ConfigLoaderImpl.load_configuration, ConfigLoaderImpl.get_group_options = load, list_options


def _first_options(words: Sequence[str]) -> list[str]:
    """Hydra composes the config of a sweep itself without what is swept. A swept group then has its default option, which
    need not have the settings that are given beside it; here it has the first one of the sweep."""
    parsed = OverridesParser.create().parse_overrides(list(words))
    return [
        f"{own.get_key_element()}={next(own.sweep_string_iterator())}"
        if own.is_sweep_override() and (own.key_or_group in GROUPS or own.key_or_group == "experiment")
        else own.input_line
        for own in parsed
    ]


def _keep_sweep(cfg: DictConfig, words: Sequence[str]) -> None:
    """Puts back what the jobs are made from."""
    with open_dict(cfg.hydra.overrides):
        for own in OverridesParser.create().parse_overrides(list(words)):
            if own.is_sweep_override() and own.input_line not in cfg.hydra.overrides.task:
                (first,) = _first_options([own.input_line])
                cfg.hydra.overrides.task[list(cfg.hydra.overrides.task).index(first)] = own.input_line


@contextlib.contextmanager
def _hydra_resolver(cfg: DictConfig) -> Iterator[None]:
    """Within it ``${hydra:...}`` means the section of this config, which Hydra itself only makes known later."""
    known = HydraConfig.instance()
    before, known.cfg = known.cfg, cfg
    try:
        yield
    finally:
        known.cfg = before


# --- the words of the command line --------------------------------------------------------------------------------


def tidy(overrides: Sequence[str], run_mode: RunMode) -> list[str]:
    """Spellings that have one sensible meaning, rewritten as Hydra wants them; hopeless ones refused."""
    words = []
    for text in overrides:
        word = _tidy_word(text, run_mode)
        if word is not None:
            words.append(word)
    return words


def _tidy_word(text: str, run_mode: RunMode) -> str | None:
    found = re.match(r"(\+\+|\+)?([\w./]+)=(.*)", text, re.DOTALL)
    if found is None:
        return text
    plus, key, value = found[1] or "", found[2], found[3]
    if key in GROUPS or key == "experiment":
        if value.strip().lower() == "null":
            if key == "experiment":
                return None  # the default
            raise ConfigError(f"'{key}' cannot be null; choose one of {', '.join(options(key))}")
        return text if value.startswith("{") else f"{key}={value}"
    annotation = annotation_of(key)
    if is_list(annotation) and _is_one_word(value):
        return f"{plus}{key}=[{value}]"
    if is_text(annotation) and value and not _parses(text):
        return f"{plus}{key}={quoted(value)}"
    return text


def _is_one_word(value: str) -> bool:
    """A plain value: no list, null, interpolation, sweep or function."""
    if value.strip().lower() == "null" or re.match(r"\s*(\[|\$?\{|\w+\()", value):
        return False
    return bool(value) and (value[0] in "'\"" or "," not in value)


def _parses(word: str) -> bool:
    try:
        OverridesParser.create().parse_override(word)
    except HydraException:
        return False
    return True


def quoted(value: str) -> str:
    """``value`` as a quoted string of Hydra's grammar."""
    body = re.sub(r"(\\*)'", r"\1\1\\'", value)
    trailing = len(body) - len(body.rstrip("\\"))
    return f"'{body}{chr(92) * trailing}'"


# --- the composed tree --------------------------------------------------------------------------------------------


def check_tree(cfg: DictConfig, single_run: bool = True) -> None:
    """Refuses what no dataclass declares, what is not set, and interpolations that lead nowhere."""
    if not issubclass(OmegaConf.get_type(cfg), TrainConfig):
        raise ConfigError("the primary config has no schema: its defaults list must begin with 'base_train'")
    choices = cfg.hydra.runtime.choices
    for group, choice in choices.items():
        if group in GROUPS and str(choice).startswith(BASE):
            raise ConfigError(f"'{group}={choice}' is a schema, not an option; choose one of {', '.join(options(group))}")
    _check_section(cfg, cfg, "", single_run)
    if single_run:
        for group in GROUPS:
            _check_name(cfg, group, str(choices.get(group)))
        _complete(cfg)


def _check_section(cfg: DictConfig, section: DictConfig, path: str, single_run: bool) -> None:
    declared = {field.name: field for field in dataclasses.fields(OmegaConf.get_type(section))}
    for name in section:
        key = f"{path}{name}"
        if key != "hydra" and name not in declared:
            raise ConfigError(unknown_key(_whole_key(key, section._get_node(name)), cfg))
    for name, field in declared.items():
        key = f"{path}{name}"
        node = section._get_node(name)
        if node is None or node._is_missing():
            if single_run:
                raise ConfigError(_not_set(key))
        elif isinstance(node, DictConfig) and dataclasses.is_dataclass(OmegaConf.get_type(node)):
            if not node._is_none():
                _check_section(cfg, node, f"{key}.", single_run)
        elif key in GROUPS:
            raise ConfigError(_untyped(cfg, key, node))
        else:
            _check_value(section, name, field.type, key)


def _whole_key(key: str, node: Node) -> str:
    """As it was written: ``+optmizer.lr=1`` makes a section of one setting."""
    while isinstance(node, DictConfig) and not node._is_none() and len(node) == 1:
        (name,) = node
        key, node = f"{key}.{name}", node._get_node(name)
    return key


def _not_set(key: str) -> str:
    if key in GROUPS:
        return f"no option of '{key}' is chosen; write {key}=" + "|".join(options(key))
    return f"'{key}' is not set; give {key}=..."


def _untyped(cfg: DictConfig, group: str, node: Node) -> str:
    if node._is_none():
        return f"'{group}' cannot be null; choose one of {', '.join(options(group))}"
    choice = cfg.hydra.runtime.choices.get(group)
    file = f"{group}/{choice}.yaml"
    return f"the option '{group}={choice}' has no schema: the defaults list of {file} must begin with a '{BASE}...' entry"


def _check_value(section: DictConfig, name: str, annotation: object, key: str) -> None:
    try:
        value = section[name]
        if OmegaConf.is_config(value):
            OmegaConf.to_container(value, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"'{key}' cannot be resolved: {str(error).splitlines()[0]}") from error
    if is_list(annotation) and value is not None:
        _check_items(section, value, annotation, key)
    if is_optional(annotation) and is_text(annotation) and value in ("None", "none"):
        raise ConfigError(f"'{key}' is the text '{value}'; for no value write null")


def _check_items(section: DictConfig, items: ListConfig, annotation: object, key: str) -> None:
    of_sections = dataclasses.is_dataclass(element_of(annotation))
    if any(item is None or OmegaConf.is_config(item) != of_sections for item in items):
        raise ConfigError(f"'{key}' must be {expected(annotation)}, got {items}")
    if of_sections:
        for number, item in enumerate(items):
            _check_section(section._get_root(), item, f"{key}[{number}].", single_run=True)


def _check_name(cfg: DictConfig, group: str, choice: str) -> None:
    """``name`` says which option a section is; changing it would only pretend to choose another."""
    name = cfg[group].get("name")
    if name is not None and choice != name and not choice.startswith(f"{name}_"):
        raise ConfigError(f"'{group}.name' cannot be set ('{name}'); to choose an option write {group}={name}")


def _complete(cfg: DictConfig) -> None:
    """Fills the defaults that depend on other settings, so that the stored config says what is used."""
    trainer, data = cfg.trainer, cfg.data
    if "path" in data and data.path is not None and str(data.dataset_id).startswith(BUILT_IN_ROWS):
        data.dataset_id = None  # as model.path does, a path alone replaces the source of the chosen option
    if "path" in data and data.path is not None and data.dataset_id == GSM8K_ID:
        data.dataset_id = None  # as above
        if data.subset == GSM8K_SUBSET:
            data.subset = "default"
    if "max_tokens" in cfg.sampler:
        _length_of_completions(cfg.reward, cfg.sampler.max_tokens)
    if "prompts_per_step" in cfg.rollout and cfg.rollout.prompts_per_step is None:
        cfg.rollout.prompts_per_step = trainer.batch_size
    if "micro_batch_size" in trainer and trainer.micro_batch_size is None and trainer.micro_batch_tokens is None:
        rows = DEFAULT_MICRO_BATCH[trainer.name]
        if data.packing:
            longest = data.max_length + (cfg.sampler.max_tokens if "max_tokens" in cfg.sampler else 0)
            trainer.micro_batch_tokens = rows * longest
        else:
            trainer.micro_batch_size = rows


def _length_of_completions(reward: DictConfig, max_tokens: int | None) -> None:
    """A length penalty that is given none ends where completions do."""
    if "max_tokens" in reward and reward.max_tokens is None:
        reward.max_tokens = max_tokens
    for part in reward.get("parts") or []:
        if part.reward is PartName.length and part.options.get("max_tokens") is None:
            OmegaConf.update(part.options, "max_tokens", max_tokens, force_add=True)
