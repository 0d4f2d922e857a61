"""Hugging Face models in this process. Names are resolved on first use, so importing this is free of torch."""

import importlib

_MODULES = {"TransformersModel": "model", "MultiLoraTransformersModel": "multi_lora"}
__all__ = list(_MODULES)


def __getattr__(name: str):
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
