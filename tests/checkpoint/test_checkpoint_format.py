"""The writer and the reader of checkpoints, seen by a model that saves and loads."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from twinkle_research.checkpoint.folder import recover
from twinkle_research.checkpoint.format import CheckpointReader, CheckpointWriter, FolderWriter, TensorFolder, TensorSpec
from twinkle_research.errors import CheckpointError


def write(root, name="c", value=1.0, **settings):
    with CheckpointWriter(root, name, step=1, backend="transformers", **settings) as writer:
        writer.add_tensors("model", [TensorSpec("w", "float32", (4,))], [("w", torch.full((4,), value))])
        writer.add_json("trainer_state.json", {"value": value})
    return root / name


def test_model_folder_loads_in_transformers(tmp_path):
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    )
    tensors = model.state_dict()
    for limit in (None, 10_000):
        with CheckpointWriter(tmp_path, f"c{limit}", step=1, backend="transformers") as writer:
            specs = [TensorSpec.of(name, tensor) for name, tensor in tensors.items()]
            writer.add_tensors("model", specs, tensors.items(), max_shard_bytes=limit)
            writer.add_files("model", model.config.save_pretrained)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / f"c{limit}" / "model")
        assert all(torch.equal(tensor, tensors[name]) for name, tensor in loaded.state_dict().items())


def test_the_same_name_again_replaces(tmp_path):
    for value in (1.0, 2.0):
        path = write(tmp_path, value=value)
    assert CheckpointReader(path).tensors("model")["w"].tolist() == [2.0] * 4
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_open_tensors_survive_a_replacement(tmp_path):
    path = write(tmp_path)
    tensors = CheckpointReader(path).tensors("model")
    first = tensors["w"]
    write(tmp_path, value=2.0)
    assert first.tolist() == [1.0] * 4


def test_an_error_inside_leaves_the_old_one(tmp_path):
    path = write(tmp_path)
    with pytest.raises(KeyError), CheckpointWriter(tmp_path, "c", step=2, backend="transformers") as writer:
        writer.add_json("trainer_state.json", {})
        assert [p.name for p in tmp_path.iterdir() if p.name.endswith(".tmp")] == ["c.tmp"]
        raise KeyError("x")
    assert CheckpointReader(path).json("trainer_state.json") == {"value": 1.0}
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def test_nothing_is_written_twice(tmp_path):
    writer = CheckpointWriter(tmp_path, "c", step=1, backend="transformers")
    writer.add_json("a.json", {})
    with pytest.raises(FileExistsError):
        writer.add_json("a.json", {})
    writer.add_tensors("m", [], [])
    with pytest.raises(FileExistsError):
        writer.add_tensors("m", [], [])
    writer.abort()
    assert list(tmp_path.iterdir()) == []


def test_deferred_tensors_are_copies(tmp_path):
    tensor = torch.ones(4)
    writer = CheckpointWriter(tmp_path, "c", step=1, backend="transformers", deferred=True)
    writer.add_tensors("model", [TensorSpec.of("w", tensor)], [("w", tensor)])
    tensor.zero_()
    assert not (tmp_path / "c.tmp" / "model").exists()
    writer.commit()
    assert CheckpointReader(tmp_path / "c").tensors("model")["w"].tolist() == [1.0] * 4


def test_recover_undoes_a_crash_between_two_renames(tmp_path):
    path = write(tmp_path)
    path.rename(tmp_path / "c.replaced")
    (tmp_path / "c.tmp").mkdir()
    (tmp_path / "c.trash").mkdir()
    recover(path)
    assert [p.name for p in tmp_path.iterdir()] == ["c"]
    CheckpointReader(path).verify()


def test_folder_writer_makes_plain_folders(tmp_path):
    with FolderWriter(tmp_path / "x" / "out") as writer:
        writer.add_tensors("", [TensorSpec("w", "float32", (1,))], [("w", torch.ones(1))])
        writer.add_files("sub", lambda path: (path / "note").write_text("hi"))
    assert sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file()) == [
        "x/out/model.safetensors",
        "x/out/sub/note",
    ]
    assert load_file(tmp_path / "x" / "out" / "model.safetensors")["w"].tolist() == [1.0]


# --- reading --------------------------------------------------------------------------------------------------------


def test_manifest_must_be_of_this_program(tmp_path):
    path = write(tmp_path)
    good = json.loads((path / "manifest.json").read_text())
    for change, message in [
        ({"format": "other"}, "not a manifest of this program"),
        ({"format_version": 2}, "format version 2 is not known"),
        ({"step": "1"}, "'step' is missing or has the wrong type"),
        ({"files": {"a": {"size": "1", "sha256": "0" * 64}}}, "entry of 'a'"),
        ({"files": {"a": {"size": 1, "sha256": "../x"}}}, "entry of 'a'"),
        ({"files": {"a": 1}}, "entry of 'a'"),
    ]:
        (path / "manifest.json").write_text(json.dumps({**good, **change}))
        with pytest.raises(CheckpointError, match=message):
            CheckpointReader(path)
    for text in ("", "[]", "[" * 100_000, "\xff"):
        (path / "manifest.json").write_bytes(text.encode("latin-1"))
        with pytest.raises(CheckpointError):
            CheckpointReader(path)
    with pytest.raises(CheckpointError, match="none does not exist"):
        CheckpointReader(tmp_path / "none")
    with pytest.raises(CheckpointError, match="unfinished save or not a checkpoint"):
        CheckpointReader(tmp_path)


def test_tensor_files_that_the_manifest_does_not_list_are_not_read(tmp_path):
    path = write(tmp_path)
    (path / "model" / "other.safetensors").write_bytes((path / "model" / "model.safetensors").read_bytes())
    reader = CheckpointReader(path)
    assert reader.unlisted() == ["model/other.safetensors"]
    assert reader.tensors("model").files == ["model.safetensors"]
    with pytest.raises(CheckpointError, match="model/other.safetensors is not in the manifest"):
        reader.tensors("model", "other")


def test_reader_says_what_there_is(tmp_path):
    reader = CheckpointReader(write(tmp_path))
    assert reader.has("model") and reader.has("trainer_state.json") and not reader.has("mod") and not reader.has("optimizer")
    with pytest.raises(CheckpointError, match="holds no 'modle'; did you mean 'model'"):
        reader.tensors("modle")
    assert reader.problems("size") == reader.problems("full") == []


def anonymous_memory():
    """Bytes of this process that are not backed by a file."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def test_loading_holds_one_tensor_at_a_time(tmp_path):
    """A model of 24 tensors of 4 MiB is read into memory that is there already."""
    specs = [TensorSpec(f"t{i}", "float32", (1 << 20,)) for i in range(24)]
    with CheckpointWriter(tmp_path, "c", step=1, backend="transformers") as writer:
        writer.add_tensors(
            "model", specs, ((s.name, torch.full(s.shape, float(i))) for i, s in enumerate(specs)), max_shard_bytes=20 << 20
        )
    target = torch.empty(24, 1 << 20).fill_(-1.0)
    tensors = TensorFolder(tmp_path / "c" / "model")
    before, most = anonymous_memory(), 0
    for i, name in enumerate(tensors):
        target[i].copy_(tensors[name])
        most = max(most, anonymous_memory() - before)
    assert target[:, 7].tolist() == [float(i) for i in range(24)]
    assert most <= 2 * (4 << 20)
