"""Where what is made once is kept: prepared models, encoded rows."""

import os
from pathlib import Path


def cache_root() -> Path:
    """$TWINKLE_CACHE, else ~/.cache/twinkle_research."""
    return Path(os.environ.get("TWINKLE_CACHE") or Path.home() / ".cache" / "twinkle_research").expanduser().resolve()
