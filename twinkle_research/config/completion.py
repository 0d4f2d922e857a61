"""Shell completion: Hydra's, which knows groups and keys, plus the values of choices and switches.

Install with ``eval "$(python train.py -sc install=bash)"`` (also for zsh), or ``install=fish | source``.
"""

import contextlib
from collections.abc import Iterator
from enum import Enum

from hydra.plugins.completion_plugin import CompletionPlugin

from twinkle_research.config.keys import annotation_of, is_optional, strip_optional
from twinkle_research.errors import ConfigError


def values_of(key: str) -> list[str]:
    """The values that a choice or a switch can take; [] for any other setting."""
    annotation = annotation_of(key)
    bare = strip_optional(annotation)
    if bare is bool:
        names = ["true", "false"]
    elif isinstance(bare, type) and issubclass(bare, Enum):
        names = [member.name for member in bare]
    else:
        return []
    return [*names, "null"] if is_optional(annotation) else names


@contextlib.contextmanager
def value_completion() -> Iterator[None]:
    query = CompletionPlugin._query

    def with_values(self: CompletionPlugin, config_name: str | None, line: str) -> list[str]:
        word = line.split()[-1] if line and not line[-1].isspace() else ""
        key, equals, started = word.partition("=")
        if equals and (names := values_of(key)):
            return [f"{key}={name}" for name in names if name.startswith(started)]
        try:
            return query(self, config_name, line)
        except ConfigError:  # an earlier word is wrong: the run will say so, the Tab key stays silent
            return []

    CompletionPlugin._query = with_values
    try:
        yield
    finally:
        CompletionPlugin._query = query
