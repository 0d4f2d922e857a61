"""The JSON header of a safetensors file, read without the library, so without torch and numpy."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from twinkle_research.errors import ConfigError

_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors format


def read_safetensors_header(path: Path) -> dict[str, dict[str, Any]]:
    """Tensor name -> {"dtype", "shape", "data_offsets"}; only the header's bytes are read, and they are checked."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else -1
            if not 0 < length <= min(size - 8, _MAX_HEADER_BYTES):
                raise ConfigError(f"{path}: not a safetensors file, or cut short ({size} bytes)")
            header = json.loads(file.read(length))
    except FileNotFoundError:
        raise ConfigError(f"{path}: named in the index but not there") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path}: damaged safetensors header ({error})") from None
    if not isinstance(header, dict):
        raise ConfigError(f"{path}: damaged safetensors header (not an object)")
    header.pop("__metadata__", None)
    end = 8 + length
    for tensor, entry in header.items():
        shape, offsets = (entry.get("shape"), entry.get("data_offsets")) if isinstance(entry, dict) else (None, None)
        if not _integers(shape) or not _integers(offsets) or len(offsets) != 2:
            raise ConfigError(f"{path}: damaged safetensors header at tensor {tensor!r}")
        if end + offsets[1] > size:
            raise ConfigError(f"{path}: cut short: tensor {tensor!r} ends at byte {end + offsets[1]}, the file at {size}")
    return header


def _integers(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(v, int) and not isinstance(v, bool) and v >= 0 for v in value)
