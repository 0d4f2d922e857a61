"""Hydra's and OmegaConf's errors in one or two lines that name the key and what to write instead."""

import dataclasses
import re
from collections.abc import Sequence
from typing import get_type_hints

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, ConfigTypeError, OmegaConfBaseException, ValidationError
from yaml import YAMLError

from twinkle_research.config.keys import (
    all_keys,
    annotation_of,
    expected,
    is_list,
    is_optional,
    is_text,
    strip_optional,
    unknown_key,
)
from twinkle_research.config.listitems import explain_item
from twinkle_research.config.schema import BASE, GROUPS, SCHEMAS, offered_groups, options
from twinkle_research.errors import nearest
from twinkle_research.sweep.config import hint_of_setting
from twinkle_research.trainer.config import TrainConfig


def explain(error: Exception, overrides: Sequence[str]) -> str:
    chain = _chain(error)
    where = _where(chain)
    for explainer in (_yaml, _missing_option, _syntax, _list_item, _hydra_text, _unknown, _wrong_type, _deleted):
        for link in chain:
            text = explainer(link, chain, overrides)
            if text:
                return text + where
    first = next((str(link) for link in reversed(chain) if str(link)), str(error))
    return "\n".join(first.splitlines()[:3]) + where


def _chain(error: BaseException | None) -> list[BaseException]:
    """The error and what led to it. OmegaConf raises one error object again while handling it, so the chain may be a ring."""
    links: list[BaseException] = []
    while error is not None and not any(error is link for link in links):
        links.append(error)
        error = error.__cause__ or error.__context__
    return links


def _where(chain: list[BaseException]) -> str:
    """The file that an error comes from, where Hydra says so."""
    for link in chain:
        found = re.match(r"In '([^']+)':", str(link))
        if found and found[1] != "train" and not isinstance(link, MissingConfigException):
            return f" (in {found[1]}.yaml)"
    return ""


def _yaml(link: BaseException, chain: list[BaseException], overrides: Sequence[str]) -> str | None:
    return " ".join(str(link).split()) if isinstance(link, YAMLError) else None


def _missing_option(link: BaseException, chain: list[BaseException], overrides: Sequence[str]) -> str | None:
    if not isinstance(link, MissingConfigException) or not link.missing_cfg_file:
        return None
    group, _, name = str(link.missing_cfg_file).rpartition("/")
    if not link.options:
        said = re.match(r"In '([^']+)':", str(link))
        file = f"{said[1]}.yaml: " if said else ""
        if group in GROUPS:
            return f"{file}there is no schema or option '{name}' in '{group}'; {nearest(name, _schemas_and_options(group))}"
        return f"{file}there is no config '{link.missing_cfg_file}'; " + nearest(group or name, [*offered_groups(), "experiment"])
    names = [option for option in link.options if not option.startswith(BASE)]
    return f"unknown option '{group}={name}'; {nearest(name, names)}"


def _schemas_and_options(group: str) -> list[str]:
    return [schema.name for schema in SCHEMAS if schema.group == group] + options(group)


def _syntax(link: BaseException, chain: list[BaseException], overrides: Sequence[str]) -> str | None:
    if not isinstance(link, OverrideParseException):
        return None
    text = link.override
    if "=" not in text:
        if text in GROUPS or text == "experiment":
            return f"'{text}' needs a value: {text}=" + "|".join(options(text))
        if text in all_keys():
            return f"'{text}' needs a value: {text}=..."
        return f"'{text}' is not of the form key=value; {nearest(text, [*offered_groups(), '--help', '--cfg', '--multirun'])}"
    key, _, value = text.partition("=")
    if value.endswith(","):
        return f"'{text}' ends with a comma; values are written without spaces between them: {text}..."
    if re.match(r"(range|interval|choice|tag|shuffle|sort)\(|\w+\(.*\)$", value) and not is_text(annotation_of(key)):
        return (
            f"cannot read the value of '{text}' ({_reason(str(link))}); several values, with -m, are {key}=a,b,c or "
            "range(start,stop,step), for hydra/sweeper=optuna also interval(low,high) or tag(log,interval(low,high))"
        )
    return f"cannot read the value of '{text}'; where it has special characters quote it twice: \"{key}='{value}'\""


def _reason(text: str) -> str:
    """Why Hydra could not evaluate a function."""
    found = re.search(r"while evaluating '.*': (.*)", text)
    return found[1][0].lower() + found[1][1:] if found else "a bracket or a comma is missing"


def _list_item(link: BaseException, chain: list[BaseException], overrides: Sequence[str]) -> str | None:
    return explain_item(link, overrides)


def _hydra_text(link: BaseException, chain: list[BaseException], overrides: Sequence[str]) -> str | None:
    """Errors of which Hydra gives only the text."""
    text = str(link)
    if found := re.match(r"Ambiguous value for argument '([^=]+)=(.*)'\n", text):
        return _several_values(*found.groups())
    if found := re.match(r"Sweep parameters '(.*)' requires --multirun", text):
        return f"'{found[1]}' asks for several runs: add -m"
    if found := re.match(r"Multiple values for ([\w/]+)\. To override a value use '(.*)'", text):
        entry = found[2].removeprefix("override ")
        return f"a second option for the group '{found[1]}'; in a defaults list write 'override /{entry}'"
    if found := re.search(r"Could not override '([^'@]+)(?:@[^']*)?'\. No match in the defaults list", text):
        return f"there is no config group '{found[1]}' to override; {nearest(found[1], offered_groups())}"
    if found := re.match(r"Could not override '(\S+)@(\S+)'\.\nDid you mean", text):
        return f"'{found[1]}@{found[2]}' is not in use; write {found[1]}=..."
    if found := re.search(r"Could not append to config\. An item is already at '(.*)'", text):
        return f"'{found[1]}' exists already: leave out the '+'"
    if found := re.search(r"Could not delete(?: from config)?\.? ?'?([\w.@/]+)", text):
        return f"'{found[1]}' cannot be deleted"
    if found := re.search(r"Merge error: (\w+) is not a subclass of (\w+)\. value: (.*)", text):
        return _merge_error(*found.groups())
    return None


def _several_values(key: str, value: str) -> str:
    annotation = annotation_of(key)
    ways = ["to run once for each add -m"]
    if is_list(annotation):
        ways.insert(0, f"for a list write {key}=[{value}]")
    if is_text(annotation):
        ways.insert(0, f"for text with a comma quote it twice, \"{key}='{value}'\"")
    return f"'{key}={value}' has several values: {'; '.join(ways)}"


def _merge_error(found: str, wanted: str, value: str) -> str:
    group = next((schema.group for schema in SCHEMAS if schema.node.__name__ == wanted), "")
    if any(schema.node.__name__ == found for schema in SCHEMAS):
        return f"two options of the group '{group}' at once; choose one of {', '.join(options(group))}"
    entry = f"{group}: {value}"
    return f"'{entry}' is not a section of settings; to choose an option put 'override /{entry}' into the defaults list"


def _unknown(link: BaseException, chain: list[BaseException], overrides: Sequence[str]) -> str | None:
    if not isinstance(link, (ConfigKeyError, ConfigAttributeError)) or not link.full_key:
        return None
    key = str(link.full_key)
    if key == "experiment":
        return "an experiment's file must begin with the line '# @package _global_' and hold settings"
    if key.startswith("_"):
        return f"unknown package '{key}': an experiment's file must begin with the line '# @package _global_'"
    said = next((m for e in chain if (m := re.match(r"Could not override '([^']+)'", str(e)))), None)
    if said and said[1].startswith(key):
        key = said[1]
    if "/" in key:
        return f"unknown config group '{key}'; {nearest(key.split('/')[0], offered_groups())}"
    if link.object_type is dict:
        return unknown_key(key, free=[str(name) for name in link.parent_node or ()])
    if dataclasses.is_dataclass(link.object_type) and key.startswith("hydra."):
        return f"unknown key '{key}'; {hint_of_setting(key, [f.name for f in dataclasses.fields(link.object_type)])}"
    root = None if link.parent_node is None else link.parent_node._get_root()
    return unknown_key(key, root if root is not None and OmegaConf.get_type(root) is TrainConfig else None)


def _wrong_type(link: BaseException, chain: list[BaseException], overrides: Sequence[str]) -> str | None:
    if not isinstance(link, ValidationError) or not link.full_key:
        return None
    key, text = str(link.full_key), str(link)
    annotation = annotation_of(key)
    if key.startswith("hydra.") and dataclasses.is_dataclass(link.object_type):
        annotation = get_type_hints(link.object_type).get(key.rpartition(".")[2])
        annotation = annotation if strip_optional(annotation) in (int, float, str) else None
    if "Invalid type assigned" in text and annotation is None:
        return f"'{key}' is a section of settings, not a value: write {key}.<setting>=..."
    if annotation is None:
        return f"'{key}': {text.splitlines()[0]}"
    found = re.match(r"(?:Value|Invalid value) '(.*?)'(?: of type '(\w+)'| is not a valid|, expected)", text)
    if found is None and "is not Optional" in text:
        return f"'{key}' cannot be null: it must be {expected(annotation)}"
    value = found[1] if found else _given(key, overrides)
    got = f", got '{value}'" if value is not None else ""
    advice = "; for no value write null" if value is not None and value.lower() == "none" and is_optional(annotation) else ""
    if value is not None and value.startswith("[") and not is_list(annotation):
        advice = f"; for a run with each of them add -m, and leave out the brackets: {key}={value.strip('[]').replace(' ', '')}"
    return f"'{key}' must be {expected(annotation, value)}{got}{advice}"


def _given(key: str, overrides: Sequence[str]) -> str | None:
    """The value that the command line gives to ``key``."""
    for text in reversed(overrides):
        name, _, value = text.lstrip("+").partition("=")
        if name == key:
            return value
    return None


def _deleted(link: BaseException, chain: list[BaseException], overrides: Sequence[str]) -> str | None:
    if isinstance(link, ConfigTypeError) and "does not support deletion" in str(link):
        return f"'{link.full_key}' cannot be deleted; give it a value"
    if isinstance(link, OmegaConfBaseException) and is_list(annotation_of(str(link.full_key))):
        return f"'{link.full_key}' must be {expected(annotation_of(link.full_key))}"
    if isinstance(link, OmegaConfBaseException) and link.full_key:
        return f"'{link.full_key}': {str(link).splitlines()[0]}"
    return None
