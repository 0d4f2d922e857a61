"""Classes and functions by name, as configs and the seed's calls give them."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from twinkle_research.errors import ConfigError, nearest


def load_symbol(name: Any, package: str, key: str) -> Any:
    """``name``: an object (returned as it is), a public name of ``package``, or a dotted path ``module.attribute``.

    ``key`` names the setting in errors. Modules in the current folder are found.
    """
    if not isinstance(name, str):
        return name
    module_name, _, attribute = name.rpartition(".")
    if not module_name:
        module = importlib.import_module(package)
        if name not in module.__all__:
            raise ConfigError(
                f"{key}={name!r} is neither known nor a dotted path (my_module.my_function); {nearest(name, module.__all__)}"
            )
        return getattr(module, name)
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as exc:
        raise ConfigError(
            f"{key}={name!r}: no module {exc.name!r} (looked in the current folder and in installed packages)"
        ) from exc
    names = [n for n in vars(module) if not n.startswith("_")]
    if attribute not in vars(module):
        raise ConfigError(f"{key}={name!r}: module {module_name!r} has no {attribute!r}; {nearest(attribute, names)}")
    return getattr(module, attribute)
