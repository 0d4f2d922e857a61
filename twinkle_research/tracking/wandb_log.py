"""Reads what earlier attempts of a run wrote into their ``.wandb`` files.

Format (wandb 0.31, ``core/pkg/leveldb``): a 7-byte header, then 32 KiB blocks of fragments
``crc32 u32 | length u16 | type u8 | data``, little-endian; type 1 = whole record, 2, 3, 4 = first, middle, last part.
A record is a ``wandb_internal_pb2.Record``.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HEADER_BYTES = 7
BLOCK_BYTES = 32768
FRAGMENT = struct.Struct("<IHB")
WHOLE, LAST = 1, 4


def read_records(path: Path) -> Iterator[Any]:
    """The ``wandb_internal_pb2.Record`` messages of one file, up to a tail that a kill has torn."""
    from wandb.proto import wandb_internal_pb2

    data = path.read_bytes()
    position, parts = HEADER_BYTES, b""
    while position + FRAGMENT.size <= len(data):
        left = BLOCK_BYTES - position % BLOCK_BYTES
        if left < FRAGMENT.size:
            position += left
            continue
        _, length, kind = FRAGMENT.unpack_from(data, position)
        start = position + FRAGMENT.size
        if kind == 0 or start + length > len(data):
            return
        parts += data[start : start + length]
        position = start + length
        if kind in (WHOLE, LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def name_of(item: Any) -> str:
    return item.key or ".".join(item.nested_key)


def values_of(history: Any) -> dict[str, Any]:
    """The row of one history record."""
    return {name_of(item): json.loads(item.value_json) for item in history.item}


def read_history(path: Path) -> Iterator[dict[str, Any]]:
    """The logged rows of one file."""
    for record in read_records(path):
        if record.WhichOneof("record_type") == "history":
            yield values_of(record.history)


def recorded_rows(folder: Path, run_id: str, after: int = -1) -> dict[int, dict[str, Any]]:
    """All rows with a ``step`` that any attempt of the run recorded under ``folder``; the newest of a step wins.

    Rows up to step ``after`` are left empty: of those only the steps are of interest, and decoding takes most of the time.
    """
    rows: dict[int, dict[str, Any]] = {}
    files = folder.glob(f"*run-*/run-{run_id}.wandb")
    for path in sorted(files, key=lambda p: (p.parent.name.rpartition("run-")[2], p.parent.name)):
        for record in read_records(path):
            if record.WhichOneof("record_type") != "history":
                continue
            step = next((json.loads(item.value_json) for item in record.history.item if name_of(item) == "step"), None)
            if isinstance(step, int):
                row = values_of(record.history) if step > after else {}
                rows[step] = rows.get(step, {}) | row
    return rows
