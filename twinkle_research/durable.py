"""What a crash must not lose."""

import os
from pathlib import Path


def fsync_path(path: Path) -> None:
    """Flushes a file's content, or a folder's names (creations, renames, deletions), to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
