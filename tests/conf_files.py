"""Composing is most of the time of tests of the command line; a third of that is reading the same YAML files again."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from omegaconf import OmegaConf


@contextmanager
def read_once() -> Iterator[None]:
    load = OmegaConf.load
    known: dict[str, Any] = {}

    def load_once(source: Any) -> Any:
        name = str(getattr(source, "name", source))
        if "/conf/" not in name or "/pytest-" in name:
            return load(source)
        if name not in known:
            known[name] = load(source)
        return copy.deepcopy(known[name])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OmegaConf, "load", staticmethod(load_once))
        yield
