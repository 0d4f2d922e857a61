"""Safetensors written one tensor at a time: the same files that the library writes, whole or refused."""

import hashlib
import json
import random
import weakref

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from twinkle_research.checkpoint.format import CheckpointReader, CheckpointWriter, FolderWriter, TensorFolder, TensorSpec
from twinkle_research.checkpoint.stream import DTYPES, SafetensorsFile, plan_shards, read_header, write_tensors
from twinkle_research.errors import CheckpointError


def specs_of(tensors):
    return [TensorSpec.of(name, tensor) for name, tensor in tensors.items()]


def all_dtypes():
    numbers = torch.arange(24).reshape(2, 3, 4) - 5
    return {name: numbers.to(getattr(torch, name)) for name in DTYPES}


ODD = {
    "scalar": torch.tensor(3.5, dtype=torch.float64),
    "empty": torch.empty(0, 3),
    "transposed": torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).T,
    "sliced": torch.arange(40, dtype=torch.int16)[1:30:3],
    "odd bytes": torch.arange(5, dtype=torch.uint8),
    "grad": torch.ones(3, requires_grad=True),
}


def write(folder, tensors, stem="model", limit=None):
    return list(write_tensors(folder, specs_of(tensors), tensors.items(), stem, limit))


@pytest.mark.parametrize("tensors", [all_dtypes(), ODD, {}, {"one": torch.ones(3)}], ids=["dtypes", "odd", "none", "one"])
def test_round_trip(tmp_path, tensors):
    [(name, size, digest)] = write(tmp_path, tensors)
    data = (tmp_path / name).read_bytes()
    assert (len(data), hashlib.sha256(data).hexdigest()) == (size, digest)
    for read in (load_file(tmp_path / name), TensorFolder(tmp_path)):
        assert set(read) == set(tensors)
        for key, tensor in tensors.items():
            assert read[key].dtype == tensor.dtype and read[key].shape == tensor.shape
            assert torch.equal(
                read[key].reshape(-1).view(torch.uint8), tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            )
    with safe_open(tmp_path / name, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert read_header(tmp_path / name) == {spec.name: spec for spec in specs_of(tensors)}


def test_tensors_are_aligned_and_header_is_padded(tmp_path):
    write(tmp_path, all_dtypes() | ODD)
    data = (tmp_path / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert length % 8 == 0
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__")
    sizes = dict(DTYPES.values())
    assert all(entry["data_offsets"][0] % sizes[entry["dtype"]] == 0 for entry in header.values())


def test_reads_what_the_library_writes(tmp_path):
    save_file(all_dtypes(), tmp_path / "model.safetensors")
    tensors = TensorFolder(tmp_path)
    assert all(torch.equal(tensors[n].float(), t.float()) for n, t in all_dtypes().items() if not t.is_complex())


def test_a_region_is_all_that_is_read(tmp_path):
    tensors = {"m": torch.arange(24.0).view(4, 6).bfloat16(), "v": torch.arange(5, dtype=torch.float64)}
    save_file(tensors, tmp_path / "model.safetensors")
    folder = TensorFolder(tmp_path)
    for rows, columns in (
        (slice(0, 4), slice(0, 6)),
        (slice(1, 3), slice(0, 6)),
        (slice(0, 4), slice(2, 5)),
        (slice(3, 4), slice(5, 6)),
    ):
        assert torch.equal(folder.region("m", (rows, columns)), tensors["m"][rows, columns])
    assert folder.region("v", (slice(1, 4),)).tolist() == [1.0, 2.0, 3.0]
    with pytest.raises(CheckpointError, match="'w' is not in this checkpoint"):
        folder.region("w", (slice(0, 1),))


def test_shards(tmp_path):
    tensors = {f"t{i}": torch.full((i + 1,), float(i)) for i in range(9)}
    files = write(tmp_path, tensors, limit=60)
    assert [name for name, _, _ in files] == list(plan_shards(specs_of(tensors), "model", 60))
    assert files[0][0] == "model-00001-of-00004.safetensors"
    for name, size, digest in files:
        data = (tmp_path / name).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (size, digest)
        assert sum(spec.nbytes for spec in read_header(tmp_path / name).values()) <= 60
    assert plan_shards(specs_of(tensors), "model", None).keys() == {"model.safetensors"}
    # One that is larger than a shard has a shard of its own.
    assert [len(s) for s in plan_shards(specs_of(tensors), "model", 1).values()] == [1] * 9


def test_sharded_folder_has_an_index(tmp_path):
    tensors = {f"t{i}": torch.full((4,), float(i)) for i in range(3)}
    with FolderWriter(tmp_path / "out") as writer:
        writer.add_tensors("", specs_of(tensors), tensors.items(), max_shard_bytes=16)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 48}
    assert index["weight_map"] == {f"t{i}": f"model-{i + 1:05d}-of-00003.safetensors" for i in range(3)}
    folder = TensorFolder(tmp_path / "out")
    assert [folder[f"t{i}"].tolist() for i in range(3)] == [[float(i)] * 4 for i in range(3)]
    assert folder.part("t2", slice(1, 3)).tolist() == [2.0, 2.0]
    assert len(folder.files) == 3
    with pytest.raises(CheckpointError, match="'t9' is not in this checkpoint"):
        folder["t9"]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([("a", torch.ones(2))], "the end of the stream"),
        ([("b", torch.ones(3)), ("a", torch.ones(2))], "expected tensor a"),
        ([("a", torch.ones(3)), ("b", torch.ones(3))], "does not fit"),
        ([("a", torch.ones(2).double()), ("b", torch.ones(3))], "does not fit"),
        ([("a", torch.ones(2)), ("b", torch.ones(3)), ("c", torch.ones(1))], "was not announced"),
    ],
)
def test_stream_must_be_what_was_announced(tmp_path, tensors, message):
    specs = [TensorSpec("a", "float32", (2,)), TensorSpec("b", "float32", (3,))]
    with pytest.raises(ValueError, match=message):
        list(write_tensors(tmp_path, specs, tensors, "model", None))


def test_wrong_use_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="given twice"):
        list(write_tensors(tmp_path, [TensorSpec("a", "float32", (1,))] * 2, [], "model", None))
    with pytest.raises(ValueError, match="cannot be stored"):
        TensorSpec("a", "quint8", (1,))
    file = SafetensorsFile(tmp_path / "x.safetensors", [TensorSpec("a", "float32", (1,))])
    with pytest.raises(ValueError, match="missing, first a"):
        file.close()


# --- damage ---------------------------------------------------------------------------------------------------------


def test_cut_anywhere_is_refused(tmp_path):
    write(tmp_path, {"a": torch.ones(3), "b": torch.ones(2)})
    path = tmp_path / "model.safetensors"
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match="model.safetensors"):
            read_header(path)
    path.write_bytes(data + b"\0")
    with pytest.raises(CheckpointError, match="its header says"):
        read_header(path)


def test_damaged_header_never_does_anything_else(tmp_path):
    """Any bytes give tensors inside the file or a CheckpointError."""
    write(tmp_path, {"a": torch.ones(3), "b": torch.ones(2, dtype=torch.int8)})
    path = tmp_path / "model.safetensors"
    data = path.read_bytes()
    draw = random.Random(0)
    header = data[8 : data.index(b"}}", 8) + 2]
    swaps = [b'"F32"', b"[3]", b"[0,12]", b"[12,14]", b'"I8"', b"}"]
    junk = [
        b"null",
        b"[-3]",
        b"[0,-1]",
        b"[1e9]",
        b'"F4"',
        b"[]",
        b"{}",
        b"[true]",
        b'"\\u0000"',
        b"[[[[",
        b"[0,12,3]",
        b"1" * 30,
    ]
    for _ in range(400):
        if draw.random() < 0.5:
            changed = header.replace(draw.choice(swaps), draw.choice(junk), 1)
            new = len(changed).to_bytes(8, "little") + changed + data[-14:]
        else:
            new = bytearray(data)
            for _ in range(draw.randint(1, 4)):
                new[draw.randrange(8 + len(header))] = draw.randrange(256)
        path.write_bytes(new)
        try:
            specs = read_header(path)
        except CheckpointError:
            continue
        assert sum(spec.nbytes for spec in specs.values()) <= len(new)


def test_deeply_nested_header_is_refused(tmp_path):
    text = b"[" * 100_000 + b"]" * 100_000
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(CheckpointError, match="damaged"):
        TensorFolder(tmp_path)


@pytest.mark.parametrize(
    "index", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": null}}', '{"weight_map": {"z": "s.safetensors"}}']
)
def test_damaged_index_is_refused(tmp_path, index):
    save_file({"a": torch.ones(1)}, tmp_path / "s.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError):
        TensorFolder(tmp_path)["a"]


def test_same_tensor_in_two_shards_is_refused(tmp_path):
    for name in ("x", "y"):
        save_file({"a": torch.ones(1), name: torch.ones(1)}, tmp_path / f"{name}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"x": "x.safetensors", "y": "y.safetensors"}}')
    with pytest.raises(CheckpointError, match="is in x.safetensors and in y.safetensors"):
        TensorFolder(tmp_path)


def test_which_set_of_tensors(tmp_path):
    with pytest.raises(CheckpointError, match="no such folder"):
        TensorFolder(tmp_path / "none")
    with pytest.raises(CheckpointError, match="no .safetensors file"):
        TensorFolder(tmp_path)
    save_file({"a": torch.ones(1)}, tmp_path / "one.safetensors")
    assert TensorFolder(tmp_path).stem == "one"
    save_file({"a": torch.ones(1)}, tmp_path / "two.safetensors")
    with pytest.raises(CheckpointError, match="several sets of tensors: one, two"):
        TensorFolder(tmp_path)
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    assert TensorFolder(tmp_path).stem == "model" and TensorFolder(tmp_path, "two").stem == "two"


# --- memory ---------------------------------------------------------------------------------------------------------


class Counted:
    """Makes tensors on demand and counts those that are alive."""

    def __init__(self, count):
        self.specs = [TensorSpec(f"t{i}", "float32", (1000,)) for i in range(count)]
        self.alive = self.most = 0

    def __iter__(self):
        for spec in self.specs:
            tensor = torch.zeros(spec.shape)
            self.alive += 1
            self.most = max(self.most, self.alive)
            weakref.finalize(tensor, self._gone)
            yield spec.name, tensor
            del tensor

    def _gone(self):
        self.alive -= 1


@pytest.mark.parametrize("limit", [None, 9000])
def test_saving_holds_one_tensor_at_a_time(tmp_path, limit):
    tensors = Counted(40)
    with CheckpointWriter(tmp_path, "c", step=1, backend="transformers") as writer:
        writer.add_tensors("model", tensors.specs, tensors, max_shard_bytes=limit)
    assert (tensors.most, tensors.alive) == (1, 0)
    assert len(CheckpointReader(tmp_path / "c").tensors("model")) == 40


def test_other_ranks_consume_one_tensor_at_a_time_and_write_nothing(tmp_path):
    tensors = Counted(40)
    with CheckpointWriter(tmp_path, "c", step=1, backend="transformers", is_writer=False) as writer:
        writer.add_tensors("model", tensors.specs, tensors)
        writer.add_json("x.json", {})
        writer.add_files("model", lambda path: path.touch())
        with pytest.raises(RuntimeError, match="does not write"):
            writer.path("model")
    assert (tensors.most, tensors.alive) == (1, 0)
    assert list(tmp_path.iterdir()) == []
