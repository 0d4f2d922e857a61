"""Models behind one interface (base.py). Names are resolved on first use, so importing this is free of torch."""

import importlib

_PACKAGES = {
    "MegatronBackendConfig": "megatron",
    "MegatronModel": "megatron",
    "MultiLoraMegatronModel": "megatron",
    "MultiLoraTransformersModel": "transformers",
    "TransformersModel": "transformers",
}
__all__ = list(_PACKAGES)


def __getattr__(name: str):
    if name in _PACKAGES:
        return getattr(importlib.import_module(f"{__name__}.{_PACKAGES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
