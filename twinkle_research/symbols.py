"""Classes and functions by name, as configs and the seed's calls give them."""

from __future__ import annotations

import importlib
import inspect
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


def construct(symbol: Any, key: str, **options: Any) -> Any:
    """``symbol(**options)`` where it is a class; an object as it is.

    Raises ConfigError for an option that the class does not have, or lacks, and for options beside a ready object.
    """
    if not isinstance(symbol, type):
        if options:
            raise ConfigError(f"{key}: {', '.join(options)} would have no effect on a {type(symbol).__name__} that is ready")
        return symbol
    parameters = inspect.signature(symbol).parameters
    if all(p.kind is not p.VAR_KEYWORD for p in parameters.values()):
        for option in options:
            if option not in parameters:
                raise ConfigError(f"{key}: {symbol.__name__} has no option {option!r}; {nearest(option, parameters)}")
    plain = [
        name for name, p in parameters.items() if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    missing = [name for name in plain if name not in options]
    if missing:
        raise ConfigError(f"{key}: {symbol.__name__} needs {', '.join(missing)}")
    return symbol(**options)
