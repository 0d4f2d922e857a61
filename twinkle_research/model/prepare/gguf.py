"""Reads the GGUF file format (github.com/ggml-org/ggml, docs/gguf.md), versions 2 and 3: metadata and tensors.

Only the three storage types that the shipped model uses are unpacked; another one is refused by name.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from twinkle_research.errors import UserError

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_DEFAULT_ALIGNMENT = 32
F32, Q4_1, Q8_0 = 0, 3, 8
_BLOCK = 32  # values in one block of the quantised types
_Q4_1 = np.dtype([("scale", "<f2"), ("minimum", "<f2"), ("nibbles", "u1", _BLOCK // 2)])
_Q8_0 = np.dtype([("scale", "<f2"), ("values", "i1", _BLOCK)])


def _unpack_q4_1(blocks: np.ndarray) -> np.ndarray:
    """value = scale * q + minimum; the low nibbles of a block come first, then the high ones."""
    nibbles = blocks["nibbles"]
    q = np.concatenate([nibbles & 15, nibbles >> 4], axis=1).astype(np.float32)
    return q * blocks["scale"].astype(np.float32)[:, None] + blocks["minimum"].astype(np.float32)[:, None]


def _unpack_q8_0(blocks: np.ndarray) -> np.ndarray:
    return blocks["values"].astype(np.float32) * blocks["scale"].astype(np.float32)[:, None]


class GGUF:
    """``metadata`` maps keys to Python values; ``tensors()`` streams (name, float32 array), one at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._at = 0
        magic, version = self._take("<4sI")
        if magic != b"GGUF" or version not in (2, 3):
            raise UserError(f"{path}: not a GGUF file of version 2 or 3")
        num_tensors, num_entries = self._take("<QQ")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = self._string()
            self.metadata[key] = self._value(self._one("<I"))
        self._infos = [self._tensor_info() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        self._start = -(-self._at // alignment) * alignment

    def _take(self, fmt: str) -> tuple[Any, ...]:
        values = struct.unpack_from(fmt, self._data, self._at)
        self._at += struct.calcsize(fmt)
        return values

    def _one(self, fmt: str) -> Any:
        return self._take(fmt)[0]

    def _string(self) -> str:
        length = self._one("<Q")
        self._at += length
        return self._data[self._at - length : self._at].decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item, count = self._take("<IQ")
            return [self._value(item) for _ in range(count)]
        return self._one(_SCALARS[kind])

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        dims = self._take(f"<{self._one('<I')}Q")
        kind, offset = self._take("<IQ")
        return name, tuple(reversed(dims)), kind, offset  # GGUF lists the fastest dimension first

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        for name, shape, kind, offset in self._infos:
            count, start = int(np.prod(shape)), self._start + offset
            if kind == F32:
                flat = np.frombuffer(self._data, "<f4", count, start).copy()
            elif kind == Q4_1:
                flat = _unpack_q4_1(np.frombuffer(self._data, _Q4_1, count // _BLOCK, start))
            elif kind == Q8_0:
                flat = _unpack_q8_0(np.frombuffer(self._data, _Q8_0, count // _BLOCK, start))
            else:
                raise UserError(f"{self.path}: tensor {name!r} is stored as GGML type {kind}; only F32, Q4_1 and Q8_0 are read")
            yield name, flat.reshape(shape)
