"""Errors inside a list of sections (``data.sources``): OmegaConf names the setting, but not the list and the element."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from yaml import YAMLError

from twinkle_research.config.keys import all_keys, element_of, expected, is_list
from twinkle_research.config.schema import config_dir
from twinkle_research.errors import nearest


def explain_item(link: BaseException, overrides: Sequence[str]) -> str | None:
    """The message for ``link`` where it comes from an element of a list of sections, else None."""
    if not isinstance(link, OmegaConfBaseException):
        return None
    for key, (annotation, _) in all_keys().items():
        if is_list(annotation) and element_of(annotation) is link.object_type:
            return _first_wrong(key, element_of(annotation), overrides) or _text(f"{key}[?]", link.object_type, link, {})
    return None


def _first_wrong(key: str, element: type, overrides: Sequence[str]) -> str | None:
    for number, item in enumerate(_given(key, overrides)):
        name = f"{key}[{number}]"
        if not isinstance(item, dict):
            return f"'{name}' must be {expected(element)}, got '{item}'"
        try:
            OmegaConf.merge(OmegaConf.structured(element), item)
        except OmegaConfBaseException as error:
            return _text(name, element, error, item)
    return None


def _text(name: str, element: type, error: OmegaConfBaseException, item: dict[str, Any]) -> str:
    fields = {field.name: field.type for field in dataclasses.fields(element)}
    setting = str(error.full_key or error.key)
    if isinstance(error, (ConfigKeyError, ConfigAttributeError)):
        return f"unknown key '{name}.{setting}'; {nearest(setting, fields)}"
    if setting in fields:
        got = f", got '{item[setting]}'" if setting in item else ""
        return f"'{name}.{setting}' must be {expected(fields[setting], str(item.get(setting)))}{got}"
    return f"'{name}.{setting}': {str(error).splitlines()[0]}"


def _given(key: str, overrides: Sequence[str]) -> list[Any]:
    """The list as the command line gives it, else the chosen experiment; [] where it stands elsewhere."""
    for word in reversed(overrides):
        if re.match(rf"\+*{re.escape(key)}=", word):
            value = OverridesParser.create().parse_override(word).value()
            return value if isinstance(value, list) else []
    for word in reversed(overrides):
        if word.startswith("experiment="):
            return _in_file(key, word.partition("=")[2])
    return []


def _in_file(key: str, experiment: str) -> list[Any]:
    try:
        node: Any = OmegaConf.to_container(OmegaConf.load(config_dir() / "experiment" / f"{experiment}.yaml"))
    except (OSError, YAMLError, OmegaConfBaseException):
        return []
    for part in key.split("."):
        node = node.get(part) if isinstance(node, dict) else None
    return node if isinstance(node, list) else []
