"""Global batches, exactly resumable. Names are resolved on first use."""

_HOME = {"DataLoader": "loader", "StreamLoader": "stream", "build_loader": "build"}
__all__ = sorted(_HOME)


def __getattr__(name: str):
    if name in _HOME:
        import importlib

        return getattr(importlib.import_module(f"twinkle_research.dataloader.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
