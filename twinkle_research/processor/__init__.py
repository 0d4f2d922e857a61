"""Features to tensors: micro-batches, padding, packing. Names are resolved on first use, so importing this is free of torch."""

__all__ = ["Batch", "Document", "InputProcessor"]


def __getattr__(name: str):
    if name in __all__:
        from twinkle_research.processor import base

        return getattr(base, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
