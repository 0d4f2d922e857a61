"""Names and types of all settings, for messages: which key was meant, what a value should be."""

import dataclasses
import difflib
import re
from enum import Enum
from functools import cache
from typing import Any, Union, get_args, get_origin

from omegaconf import DictConfig, OmegaConf

from twinkle_research.config.schema import GROUPS, SCHEMAS, Schema, config_dir, leaves, offered_groups, options, root_leaves
from twinkle_research.errors import nearest

# Likeness from which a name counts as a misspelling of another one of the same section, or of another section.
_CUTOFF = 0.6
_CUTOFF_ELSEWHERE = 0.75

# What other trainers call it -> what to write here.
_NAMES_ELSEWHERE = {
    "learning_rate": "write optimizer.lr",
    "gradient_accumulation_steps": "it follows from trainer.batch_size (rows a step) and trainer.micro_batch_size (rows a pass)",
    "per_device_train_batch_size": "write trainer.micro_batch_size; trainer.batch_size counts the rows of a step over all ranks",
    "num_train_epochs": "write trainer.epochs",
    "output_dir": "write run_dir",
}


@cache
def all_keys() -> dict[str, tuple[object, tuple[Schema, ...]]]:
    """Dotted name -> (type, schemas that have it) of every setting of every option."""
    found: dict[str, tuple[object, tuple[Schema, ...]]] = {name: (field.type, ()) for name, field in root_leaves().items()}
    for schema in SCHEMAS:
        for name, field in leaves(schema.node, f"{schema.group}.").items():
            _, owners = found.get(name, (None, ()))
            found[name] = (field.type, (*owners, schema))
    return found


@cache
def options_of(schema: Schema) -> tuple[str, ...]:
    """Options of the group whose YAML builds on this schema, directly or through another option."""
    bases = {}
    for name in options(schema.group):
        text = (config_dir() / schema.group / f"{name}.yaml").read_text(encoding="utf-8")
        bases[name] = re.findall(r"^\s*-\s*(\w+)(?:@\w+)?\s*$", text, re.MULTILINE)

    def builds_on(name: str) -> bool:
        return schema.name in bases[name] or any(builds_on(base) for base in bases[name] if base in bases and base != name)

    return tuple(name for name in bases if builds_on(name))


def annotation_of(key: str) -> object | None:
    """Type of a setting, from whichever option has it. ``a.b[1]`` is the type of an element."""
    name, _, index = key.partition("[")
    annotation = all_keys().get(name, (None, ()))[0]
    if index and annotation is not None:
        return element_of(annotation)
    return annotation


def element_of(annotation: object) -> Any:
    """Type of the elements of a list."""
    return get_args(strip_optional(annotation))[0]


def is_optional(annotation: object) -> bool:
    return get_origin(annotation) is Union and type(None) in get_args(annotation)


def strip_optional(annotation: object) -> Any:
    return next(a for a in get_args(annotation) if a is not type(None)) if is_optional(annotation) else annotation


def is_text(annotation: object) -> bool:
    return strip_optional(annotation) is str


def is_list(annotation: object) -> bool:
    return get_origin(strip_optional(annotation)) is list


def expected(annotation: object, value: str | None = None) -> str:
    """'a number', 'one of none, ddp; did you mean ...': what a value of this type looks like."""
    bare = strip_optional(annotation)
    if isinstance(bare, type) and issubclass(bare, Enum):
        names = [member.name for member in bare]
        text = f"one of {', '.join(names)}"
        close = difflib.get_close_matches(str(value), names, n=1, cutoff=_CUTOFF)
        if close:
            text += f" (did you mean '{close[0]}'?)"
    elif is_list(bare):
        text = f"a list, for example [{_example(element_of(bare))}]"
    elif isinstance(bare, type) and dataclasses.is_dataclass(bare):
        text = f"a section with the settings {', '.join(f.name for f in dataclasses.fields(bare))}"
    else:
        text = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}.get(bare, "another value")
    return f"{text}, or null" if is_optional(annotation) else text


def _example(element: object) -> str:
    if dataclasses.is_dataclass(element):
        return "{" + ", ".join(f"{field.name}: ..." for field in dataclasses.fields(element)[:2]) + "}, {...}"
    return {float: "0.9,0.95", int: "1,2"}.get(element, "a,b")  # type: ignore[arg-type]


def valid_keys(cfg: DictConfig | None) -> list[str]:
    """Dotted names that can be set: under the options composed so far; under any option of a group not yet composed."""
    chosen = {} if cfg is None else {g: OmegaConf.get_type(cfg, g) for g in GROUPS if g in cfg and cfg._get_node(g)}
    return [
        key
        for key, (_, owners) in all_keys().items()
        if not owners or any(chosen.get(schema.group, schema.node) is schema.node for schema in owners)
    ]


def unknown_key(key: str, cfg: DictConfig | None = None, free: list[str] | None = None) -> str:
    """Message for a setting that does not exist. ``free``: the keys of the free-form section it was looked for in."""
    return f"unknown key '{key}'; {hint(key, cfg, free)}"


def hint(key: str, cfg: DictConfig | None = None, free: list[str] | None = None) -> str:
    group, _, rest = key.partition(".")
    known = all_keys()
    if key in known:  # it exists, but not under the chosen option
        owners = [f"{group}={name}" for schema in known[key][1] for name in options_of(schema)]
        return f"it is a setting of {' or '.join(owners)}, not of the chosen option"
    if free is not None:
        parent = key.rpartition(".")[0]
        close = difflib.get_close_matches(key, [f"{parent}.{name}" for name in free], n=1, cutoff=_CUTOFF)
        return f"did you mean '{close[0]}'?" if close else f"to add a new entry write +{key}=..."
    if key.rpartition(".")[2] in _NAMES_ELSEWHERE:
        return _NAMES_ELSEWHERE[key.rpartition(".")[2]]
    valid = valid_keys(cfg)
    if group in ("launcher", "sweeper", "sweep"):
        return f"write hydra{'.' if rest else '/'}{key}"
    best = _nearest_keys(key, valid)
    if best:
        return "did you mean " + " or ".join(f"'{name}'" for name in best) + "?"
    if group in GROUPS and rest:
        names = [k for k in valid if k.startswith(group + ".") and not k.endswith(".name")]
        return f"settings of {group} here: {', '.join(names)}" if names else f"the chosen {group} option has no settings"
    return nearest(group, [*offered_groups(), "experiment", *root_leaves()])


def _nearest_keys(key: str, valid: list[str]) -> list[str]:
    """The most alike of the valid names, or up to three equally alike. What counts is the last part; a name of the same
    section is preferred, and across sections the likeness must be closer."""
    parent, _, leaf = key.rpartition(".")
    scores: dict[str, float] = {}
    for name in [*valid, *GROUPS, "experiment", *_sections(valid)]:
        its_parent, _, its_leaf = name.rpartition(".")
        alike = _ratio(leaf, its_leaf)
        if its_parent == parent:
            scores[name] = alike + 0.15 if alike >= _CUTOFF else 0.0
        elif alike >= _CUTOFF_ELSEWHERE and its_leaf != "name":
            scores[name] = alike + 0.1 * _ratio(parent, its_parent)
    best = max(scores.values(), default=0.0)
    return [name for name, score in scores.items() if score == best][:3] if best else []


def _ratio(a: str, b: str) -> float:
    """Likeness in [0, 1]; 0 where it is too small to matter, which is quick to see."""
    matcher = difflib.SequenceMatcher(None, a, b)
    alike = matcher.real_quick_ratio() >= _CUTOFF and matcher.quick_ratio() >= _CUTOFF
    return matcher.ratio() if alike else 0.0


def _sections(names: list[str]) -> list[str]:
    """Sections inside groups, such as ``tracking.wandb``."""
    return list(dict.fromkeys(name.rpartition(".")[0] for name in names if name.count(".") > 1))
