"""What of Megatron is here. Nothing is imported."""

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec


def megatron_version() -> str | None:
    """Of megatron-core; None where it is not installed."""
    try:
        return version("megatron-core")
    except PackageNotFoundError:
        return None


def transformer_engine_installed() -> bool:
    """With its part for PyTorch: the bare package cannot be imported."""
    return find_spec("transformer_engine") is not None and find_spec("transformer_engine_torch") is not None
