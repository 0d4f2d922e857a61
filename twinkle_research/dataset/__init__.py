"""Rows from files, hubs and the built-in set. Names are resolved on first use."""

_HOME = {
    "Dataset": "base",
    "DatasetMeta": "sources",
    "EncodedCache": "cache",
    "IterableDataset": "stream",
    "MixedDataset": "mix",
    "PromptDataset": "prompts",
    "build_datasets": "build",
    "build_prompts": "prompts",
}
__all__ = sorted(_HOME)


def __getattr__(name: str):
    if name in _HOME:
        import importlib

        return getattr(importlib.import_module(f"twinkle_research.dataset.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
