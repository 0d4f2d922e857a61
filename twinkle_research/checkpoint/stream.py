"""Safetensors files written and read one tensor at a time.

Layout: 8 bytes of little-endian header length, a JSON header padded with spaces, then the tensors without holes
(https://github.com/huggingface/safetensors#format). Importing this module does not import torch.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinkle_research.checkpoint.files import CHUNK, sha256_file, write_all
from twinkle_research.checkpoint.names import (
    PARTS,
    PICKLE_SUFFIXES,
    UnsafeCheckpoint,
    refuse_pickle,
    resolve_inside,
    safe_relative,
)  # fmt: skip
from twinkle_research.errors import CheckpointError

if TYPE_CHECKING:
    import torch

# torch name -> (safetensors name, bytes per element)
DTYPES = {
    "float64": ("F64", 8), "float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2),
    "int64": ("I64", 8), "int32": ("I32", 4), "int16": ("I16", 2), "int8": ("I8", 1),
    "uint64": ("U64", 8), "uint32": ("U32", 4), "uint16": ("U16", 2), "uint8": ("U8", 1), "bool": ("BOOL", 1),
    "complex64": ("C64", 8), "float8_e4m3fn": ("F8_E4M3", 1), "float8_e5m2": ("F8_E5M2", 1),
}  # fmt: skip
_TORCH_NAMES = {code: name for name, (code, _) in DTYPES.items()}
_MAX_HEADER = 100_000_000  # the safetensors library refuses more


@dataclass(frozen=True)
class TensorSpec:
    """What a tensor will be, before it exists. ``dtype`` is torch's name without the prefix: "float32"."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"tensor {self.name}: dtype {self.dtype!r} cannot be stored; valid: {', '.join(DTYPES)}")

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> TensorSpec:
        return cls(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype][1]


class SafetensorsFile:
    """One safetensors file being written, tensor by tensor in the order of ``specs``.

    On disk wider elements come first, so that every tensor is aligned to its element. Where that is also the order of
    ``specs`` (one dtype, the usual case) the file is hashed while it is written, else it is read once more.
    ``metadata``: more of the header's.
    """

    def __init__(self, path: Path, specs: Sequence[TensorSpec], metadata: Mapping[str, str] | None = None) -> None:
        layout = sorted(specs, key=lambda spec: -DTYPES[spec.dtype][1])  # stable
        header: dict[str, Any] = {"__metadata__": {"format": "pt"} | dict(metadata or {})}  # transformers wants it
        self._offsets: dict[str, int] = {}
        end = 0
        for spec in layout:
            header[spec.name] = {
                "dtype": DTYPES[spec.dtype][0], "shape": list(spec.shape), "data_offsets": [end, end + spec.nbytes],
            }  # fmt: skip
            self._offsets[spec.name] = end
            end += spec.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._start = 8 + len(text)
        self.path = path
        self.size = self._start + end
        self._todo = {spec.name: spec for spec in specs}
        self._hash = hashlib.sha256() if list(specs) == layout else None
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115 (closed by close or abort)
        self._append(memoryview(len(text).to_bytes(8, "little") + text))

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Raises ValueError where ``tensor`` is not what its spec said."""
        spec = self._todo.pop(name, None)
        if spec is None or TensorSpec.of(name, tensor) != spec:
            raise ValueError(f"tensor {TensorSpec.of(name, tensor)} does not fit what was announced: {spec}")
        if self._hash is None:
            self._file.seek(self._start + self._offsets[name])
        if spec.nbytes:
            self._append(_raw_bytes(tensor))

    def close(self) -> tuple[int, str]:
        """Flushes to the disk; returns (size, sha256)."""
        if self._todo:
            self.abort()
            raise ValueError(f"{self.path.name}: {len(self._todo)} announced tensors are missing, first {next(iter(self._todo))}")
        os.fsync(self._file.fileno())
        self._file.close()
        return self.size, self._hash.hexdigest() if self._hash else sha256_file(self.path)

    def abort(self) -> None:
        self._file.close()

    def _append(self, data: memoryview) -> None:
        for start in range(0, len(data), CHUNK):
            chunk = data[start : start + CHUNK]
            if self._hash:
                self._hash.update(chunk)
            write_all(self._file, chunk)


def _raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The tensor's bytes; no copy is made of a contiguous CPU tensor."""
    import torch

    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())


def plan_shards(specs: Sequence[TensorSpec], stem: str, max_shard_bytes: int | None) -> dict[str, list[TensorSpec]]:
    """File name -> tensors in it: ``model.safetensors``, or ``model-00001-of-00003.safetensors`` and so on."""
    shards: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in specs:
        if max_shard_bytes is not None and shards[-1] and size + spec.nbytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(spec)
        size += spec.nbytes
    if len(shards) == 1:
        return {f"{stem}.safetensors": shards[0]}
    return {f"{stem}-{i:05d}-of-{len(shards):05d}.safetensors": shard for i, shard in enumerate(shards, 1)}


def write_tensors(
    folder: Path, specs: Sequence[TensorSpec], tensors: Iterable[tuple[str, torch.Tensor]], stem: str,
    max_shard_bytes: int | None = None, metadata: Mapping[str, str] | None = None,
) -> Iterator[tuple[str, int, str]]:  # fmt: skip
    """Writes ``tensors`` (in the order of ``specs``) into ``folder``; yields (file name, size, sha256) of each file.

    Of the tensors only the one being written is referenced. The index of a sharded set is the caller's to write.
    """
    names = [spec.name for spec in specs]
    if len(set(names)) != len(names):
        raise ValueError(f"tensor names given twice: {sorted({n for n in names if names.count(n) > 1})[:3]}")
    iterator = iter(tensors)
    for file_name, shard in plan_shards(specs, stem, max_shard_bytes).items():
        file = SafetensorsFile(folder / file_name, shard, metadata)
        try:
            for spec in shard:
                item = next(iterator, None)
                if item is None or item[0] != spec.name:
                    raise ValueError(f"expected tensor {spec.name}, got {item[0] if item else 'the end of the stream'}")
                file.write(*item)
                del item  # only the stream may keep the tensor alive
            size, digest = file.close()
        except BaseException:
            file.abort()
            raise
        yield file_name, size, digest
    if (extra := next(iterator, None)) is not None:
        raise ValueError(f"tensor {extra[0]} was not announced")


# --- reading ----------------------------------------------------------------------------------------------------------


def read_header(path: Path) -> dict[str, TensorSpec]:
    """The tensors of one safetensors file. Raises CheckpointError where it is cut, damaged or something else."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 2 <= length <= min(_MAX_HEADER, size - 8):
                raise ValueError("it is cut or not a safetensors file")
            header = json.loads(file.read(length))
        return _check_header(header, size - 8 - length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: damaged safetensors file: {error}") from error


def _check_header(header: dict[str, Any], data_size: int) -> dict[str, TensorSpec]:
    header.pop("__metadata__", None)
    specs = {}
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        spec = TensorSpec(name, _TORCH_NAMES.get(entry["dtype"], entry["dtype"]), tuple(entry["shape"]))
        begin, stop = entry["data_offsets"]
        if begin != end or stop - begin != spec.nbytes or any(type(n) is not int or n < 0 for n in spec.shape):
            raise ValueError(f"tensor {name} has impossible offsets or shape")
        specs[name] = spec
        end = stop
    if end != data_size:
        raise ValueError(f"it holds {data_size} bytes of tensors, its header says {end}")
    return specs


class TensorFolder(Mapping):
    """The tensors of a folder with ``<stem>.safetensors`` or ``<stem>.safetensors.index.json`` and its shards.

    ``folder[name]`` reads that one tensor (memory-mapped: copy it before the file goes away or to write to it),
    ``folder.spec(name)`` says what it is without reading it, ``part`` and ``region`` read some of it.
    Pickle files are never opened. Links are followed only with ``follow_links`` (the Hugging Face cache consists of links).
    """

    def __init__(self, path: str | Path, stem: str | None = None, *, follow_links: bool = False) -> None:
        self.path = Path(path)
        self._follow_links = follow_links
        self.stem = stem or self._find_stem()
        self._file_of: dict[str, str] = {}
        self._specs: dict[str, TensorSpec] = {}
        self._open: tuple[str, Any] | None = None
        if (self.path / f"{self.stem}{PARTS}").is_file():
            raise CheckpointError(
                f"{self.path} holds the parts of tensors that checkpoint.format=sharded writes. Make whole ones: "
                "python -m twinkle_research.checkpoint convert <checkpoint or run folder> -o <new folder>"
            )
        index = f"{self.stem}.safetensors.index.json"
        if self._locate(index).is_file():
            self._read_index(index)
        else:
            self._add_file(f"{self.stem}.safetensors")

    def _find_stem(self) -> str:
        if not self.path.is_dir():
            raise CheckpointError(f"{self.path}: no such folder")
        names = sorted(entry.name for entry in self.path.iterdir())
        for ending in (PARTS, ".safetensors.index.json", ".safetensors"):
            stems = [name.removesuffix(ending) for name in names if name.endswith(ending)]
            if len(stems) == 1:
                return stems[0]
            if len(stems) > 1:
                preferred = [stem for stem in stems if stem in ("model", "adapter_model")]
                if len(preferred) == 1:
                    return preferred[0]
                raise CheckpointError(f"{self.path}: several sets of tensors: {', '.join(stems)}")
        for name in names:
            if name.lower().endswith(PICKLE_SUFFIXES):
                refuse_pickle(name, str(self.path))
        raise CheckpointError(f"{self.path}: no .safetensors file in this folder")

    def _locate(self, name: str) -> Path:
        refuse_pickle(name, str(self.path))
        if self._follow_links:
            return self.path / safe_relative(name, str(self.path))
        return resolve_inside(self.path, name, str(self.path))

    def _read_index(self, index: str) -> None:
        where = self.path / index
        try:
            weight_map = json.loads(where.read_text(encoding="utf-8"))["weight_map"]
            files = sorted(set(weight_map.values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{where}: damaged index: {error!r}") from error
        for file_name in files:
            if "/" in safe_relative(file_name, str(where)):
                raise UnsafeCheckpoint(f"{where}: '{file_name}' is refused: shards lie beside their index")
            self._add_file(file_name)
        wrong = [name for name, file_name in weight_map.items() if self._file_of.get(name) != file_name]
        if wrong:
            raise CheckpointError(f"{where}: tensor {wrong[0]} is not in {weight_map[wrong[0]]}")

    def _add_file(self, file_name: str) -> None:
        for name, spec in read_header(self._locate(file_name)).items():
            if name in self._specs:
                raise CheckpointError(f"{self.path}: tensor {name} is in {self._file_of[name]} and in {file_name}")
            self._file_of[name] = file_name
            self._specs[name] = spec

    @property
    def files(self) -> list[str]:
        return sorted(set(self._file_of.values()))

    def spec(self, name: str) -> TensorSpec:
        self._known(name)
        return self._specs[name]

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._handle(name).get_tensor(name)

    def part(self, name: str, rows: slice) -> torch.Tensor:
        """Some rows of a tensor; the others are not read."""
        return self[name] if rows == slice(None) else self._handle(name).get_slice(name)[rows]

    def region(self, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        """A part of a tensor, one slice with start and stop for each dimension; the rest is not read."""
        whole = tuple(slice(0, size) for size in self.spec(name).shape)
        return self[name] if index == whole else self._handle(name).get_slice(name)[index]

    def _handle(self, name: str) -> Any:
        from safetensors import SafetensorError, safe_open

        self._known(name)
        file_name = self._file_of[name]
        if self._open is None or self._open[0] != file_name:  # one open file at a time bounds what is mapped
            try:
                self._open = (file_name, safe_open(self._locate(file_name), framework="pt", device="cpu"))
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{self.path / file_name}: {error}") from error
        return self._open[1]

    def _known(self, name: str) -> None:
        if name not in self._specs:
            raise CheckpointError(f"{self.path}: tensor {name!r} is not in this checkpoint")

    def __contains__(self, name: object) -> bool:
        return name in self._specs

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)
