"""Global batches, exactly resumable. Names are resolved on first use."""

__all__ = ["DataLoader"]


def __getattr__(name: str):
    if name in __all__:
        from twinkle_research.dataloader.loader import DataLoader

        return DataLoader
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
