"""Megatron-Core's models, spread over processes. Names are resolved on first use, so importing this is free of torch."""

import importlib
import warnings

# Each part of Megatron-Core warns of what it could use if Transformer Engine or Apex were here.
warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
# It calls collectives by names that torch 2.13 has given up.
warnings.filterwarnings("ignore", category=FutureWarning, message=r"`torch\.distributed\.\w+` is deprecated")

_MODULES = {"MegatronBackendConfig": "config", "MegatronModel": "model", "MultiLoraMegatronModel": "multi_lora"}
__all__ = list(_MODULES)


def __getattr__(name: str):
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
