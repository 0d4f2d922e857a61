"""Configuration: typed options, strict composing, validation, the run plan and the command line.

    cfg = compose(["model=tiny", "trainer.max_steps=3"])   # DictConfig, checked
    config = to_object(cfg)                                 # TrainConfig, a tree of dataclasses

Nothing in this package imports torch.
"""

import importlib

_HOME = {
    "compose": "composing",
    "config_dir": "schema",
    "to_object": "storage",
    "save_config": "storage",
    "load_config": "storage",
    "diff": "resume",
    "check_resume": "resume",
    "resumable_changes": "resume",
    "validate": "checks",
}


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
