"""Models behind one interface (base.py). Names are resolved on first use, so importing this is free of torch."""

__all__ = ["MultiLoraTransformersModel", "TransformersModel"]


def __getattr__(name: str):
    if name in __all__:
        from twinkle_research.model import transformers

        return getattr(transformers, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
