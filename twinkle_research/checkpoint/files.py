"""Files that survive a crash: written, flushed to the disk, then renamed; never changed in place."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

from twinkle_research.checkpoint.names import RESERVED_SUFFIXES, TRASH
from twinkle_research.durable import fsync_path

CHUNK = 8 << 20


def make_folders(path: Path) -> None:
    """``mkdir -p``, durably."""
    if not path.is_dir():
        make_folders(path.parent)
        path.mkdir(exist_ok=True)
        fsync_path(path.parent)


def write_new(path: Path, data: bytes) -> None:
    """Writes a file that must not exist yet, durably but for its name (see fsync_path)."""
    with open(path, "xb", buffering=0) as file:
        write_all(file, memoryview(data))
        os.fsync(file.fileno())


def write_all(file, data: memoryview) -> None:
    """Unbuffered files may take less than they are given."""
    while len(data):
        data = data[file.write(data) :]


def write_pointer(path: Path, name: str) -> None:
    """Replaces the pointer file ``path`` by one that names ``name``, atomically and durably."""
    temporary = path.with_name(f"{path.name}.new")
    temporary.unlink(missing_ok=True)
    write_new(temporary, f"{name}\n".encode())
    os.replace(temporary, path)
    fsync_path(path.parent)


def sha256_file(path: Path) -> str:
    with open(path, "rb", buffering=0) as file:
        digest = hashlib.sha256()
        buffer = memoryview(bytearray(min(CHUNK, os.fstat(file.fileno()).st_size + 1)))
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def remove_folder(path: Path) -> None:
    """Deletes a folder. A finished one first loses its name in one step, so that no half of it is left by a crash."""
    if not path.name.endswith(RESERVED_SUFFIXES):
        trash = path.with_name(path.name + TRASH)
        if trash.exists():
            shutil.rmtree(trash)
        os.rename(path, trash)
        fsync_path(path.parent)
        path = trash
    shutil.rmtree(path)
