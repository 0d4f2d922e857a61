"""Case S34: names that lead out of the checkpoint folder."""

import json

import pytest
import torch

from twinkle_research.checkpoint.format import CheckpointReader, CheckpointWriter, TensorFolder, TensorSpec, publish_latest
from twinkle_research.checkpoint.manifest import read_manifest
from twinkle_research.checkpoint.names import safe_name, safe_relative, step_name, step_of
from twinkle_research.checkpoint.newest import newest_checkpoint
from twinkle_research.errors import CheckpointError

BAD_NAMES = [
    "../../evil", "a/b", "..", ".", "...", "", "a\0b", "\0", "%2e%2e%2fevil", "C:\\x", "x" * 300, "/etc", "~", "a b", "a\n",
    "-rf", ".hidden", "a\\b", "ä", "１", None, 7, b"a", "latest", "best", "step-000001.tmp", "x.replaced", "x.trash",
]  # fmt: skip


@pytest.mark.parametrize("name", BAD_NAMES, ids=[repr(n)[:30] for n in BAD_NAMES])
def test_bad_names_are_refused_everywhere_and_nothing_is_written(tmp_path, name):
    root = tmp_path / "a" / "root"
    root.mkdir(parents=True)
    (tmp_path / "evil").mkdir()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match="refused"):
        safe_name(name)
    with pytest.raises(CheckpointError, match="refused"):
        CheckpointWriter(root, name, step=1, backend="transformers")
    with pytest.raises(CheckpointError, match="refused"):
        publish_latest(root, name)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["ok-1.step_2", "step-000010", "a", "0", "A" * 128, "final..v2"])
def test_good_names_work(tmp_path, name):
    assert safe_name(name) == name
    with CheckpointWriter(tmp_path, name, step=1, backend="transformers") as writer:
        writer.add_json("trainer_state.json", {})
    assert CheckpointReader(tmp_path / name).step == 1


def test_step_names():
    assert step_name(10) == "step-000010" and step_name(12345678) == "step-12345678"
    assert step_of("step-000010") == 10 and step_of("step-12345678") == 12345678
    for name in ("step-10", "step-000010.tmp", "xstep-000010", "step-000010\n", "step--00001", "step-٠٠٠٠٠١"):
        assert step_of(name) is None, name


BAD_FILES = ["../x", "/etc/passwd", "a/../b", "./a", "a//b", "", "a/", "\0", "a\\..\\b", "..", "C:/x", "a/" * 20 + "b", 3, None]


@pytest.mark.parametrize("name", BAD_FILES, ids=[repr(n)[:30] for n in BAD_FILES])
def test_file_names_stay_inside(tmp_path, name):
    with pytest.raises(CheckpointError, match="refused"):
        safe_relative(name, "test")
    writer = CheckpointWriter(tmp_path, "c", step=1, backend="transformers")
    with pytest.raises((CheckpointError, AttributeError)):
        writer.add_bytes(name, b"x")
    writer.abort()
    assert list(tmp_path.iterdir()) == []


# --- what a manifest, an index or a pointer names -------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path):
    tensors = {f"t{i}": torch.full((4,), float(i)) for i in range(3)}
    with CheckpointWriter(tmp_path / "checkpoints", "step-000001", step=1, backend="transformers") as writer:
        writer.add_tensors("model", [TensorSpec.of(n, t) for n, t in tensors.items()], tensors.items(), max_shard_bytes=16)
        writer.add_json("trainer_state.json", {"step": 1})
    return tmp_path / "checkpoints" / "step-000001"


def edit(path, change):
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


@pytest.mark.parametrize("name", ["../x.safetensors", "/x.safetensors", "..", "sub/x.safetensors", "x.bin", "", 5])
def test_index_cannot_lead_outside(checkpoint, name):
    """A file of that name would even be there."""
    good = next(checkpoint.glob("model/*-00001-*"))
    (checkpoint / "x.safetensors").write_bytes(good.read_bytes())
    edit(checkpoint / "model" / "model.safetensors.index.json", lambda index: index["weight_map"].update(t0=name))
    with pytest.raises(CheckpointError, match="refused|damaged"):
        TensorFolder(checkpoint / "model")
    with pytest.raises(CheckpointError):
        newest_checkpoint(checkpoint)


@pytest.mark.parametrize(
    "name", ["../../../secret", "/etc/hostname", "model/../../x", "optimizer/optimizer.pt", "rng.pkl", "x.BIN"]
)
def test_manifest_cannot_lead_outside(checkpoint, name):
    entry = {"size": 1, "sha256": "0" * 64}
    edit(checkpoint / "manifest.json", lambda manifest: manifest["files"].update({name: entry}))
    with pytest.raises(CheckpointError, match="refused"):
        read_manifest(checkpoint)
    with pytest.raises(CheckpointError, match="refused"):
        newest_checkpoint(checkpoint.parent)


def test_pointer_cannot_lead_outside(checkpoint):
    outside = checkpoint.parent.parent / "outside"
    checkpoint.rename(outside)
    (checkpoint.parent / "latest").write_text("../outside\n")
    with pytest.raises(CheckpointError, match="refused"):
        newest_checkpoint(checkpoint.parent)


@pytest.mark.parametrize("name", ["trainer_state.json", "model", "model/model.safetensors.index.json", "manifest.json", "extra"])
def test_links_are_refused(checkpoint, tmp_path, name):
    target = tmp_path / "elsewhere"
    if (checkpoint / name).exists():
        (checkpoint / name).rename(target)
    else:
        target.write_text("secret")
    (checkpoint / name).symlink_to(target)
    with pytest.raises(CheckpointError, match="symbolic link"):
        CheckpointReader(checkpoint)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "optimizer", "model/none.json", "..", "trainer_state"])
def test_reader_gives_only_its_own_files(checkpoint, name):
    reader = CheckpointReader(checkpoint)
    for read in (reader.resolve, reader.json, reader.tensors):
        with pytest.raises(CheckpointError, match="refused|holds no"):
            read(name)


def test_run_folder_may_be_a_link(checkpoint, tmp_path):
    """People link run folders to larger disks."""
    (tmp_path / "linked").symlink_to(checkpoint.parent)
    assert newest_checkpoint(tmp_path / "linked") == tmp_path / "linked" / "step-000001"
