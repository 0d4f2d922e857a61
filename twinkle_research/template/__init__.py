"""Chat templates: conversations to token ids and labels. Names are resolved on first use."""

__all__ = ["Qwen3_5Template", "Template", "build_template"]


def __getattr__(name: str):
    if name in __all__:
        from twinkle_research.template import base

        return getattr(base, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
