"""Saving, finding and keeping the checkpoints of a run (cases S20, S22 and S33)."""

import hashlib
import json
import logging
import shutil
import threading

import pytest
import torch

from twinkle_research.checkpoint.config import CheckpointConfig
from twinkle_research.checkpoint.format import CheckpointReader, CheckpointWriter, TensorSpec, publish_latest
from twinkle_research.checkpoint.manager import CheckpointManager, newest_checkpoint
from twinkle_research.distributed.runtime import Runtime
from twinkle_research.errors import CheckpointError
from twinkle_research.trainer.rundir import RunFolder


class Weights:
    """What a save needs of a model."""

    backend = "transformers"
    layout = {"world_size": 1, "sharding": "none"}

    def __init__(self, value=0.0, optimizer=True):
        self.tensors = {f"layer.{i}.weight": torch.full((8,), value + i) for i in range(3)}
        self.optimizer = optimizer

    def save_state(self, writer, save_optimizer=True):
        specs = [TensorSpec.of(name, tensor) for name, tensor in self.tensors.items()]
        writer.add_tensors("model", specs, self.tensors.items())
        writer.add_json("model/config.json", {"model_type": "llama"})
        if self.optimizer:
            writer.add_tensors("optimizer", specs, self.tensors.items(), stem="optimizer", max_shard_bytes=32)
        return {"cur_step": 3}


def manager(run, **settings):
    return CheckpointManager(RunFolder(run), CheckpointConfig(**settings), Runtime())


def save(run, *steps, **settings):
    checkpoints = manager(run, **settings)
    for step in steps:
        checkpoints.save(step, Weights(step), {"step": step})
    return run / "checkpoints"


def names(root):
    return sorted(path.name for path in root.iterdir())


# --- saving ---------------------------------------------------------------------------------------------------------


def test_saved_checkpoint(tmp_path):
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    checkpoints = manager(tmp_path)
    path = checkpoints.save(10, Weights(5.0), {"step": 10, "epoch": 1}, metric=1.25)
    assert path == tmp_path / "checkpoints" / "step-000010" == checkpoints.latest()
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-000010\n"
    reader = CheckpointReader(path)
    assert reader.json("trainer_state.json") == {"step": 10, "epoch": 1, "model": {"cur_step": 3}}
    assert {n: t.tolist() for n, t in reader.tensors("model").items()} == {f"layer.{i}.weight": [5.0 + i] * 8 for i in range(3)}
    assert len(reader.tensors("optimizer").files) == 3
    manifest = json.loads((path / "manifest.json").read_text())
    assert manifest["format_version"] == 1 and manifest["step"] == 10 and manifest["backend"] == "transformers"
    assert manifest["layout"] == {"world_size": 1, "sharding": "none"} and manifest["metric"] == 1.25
    assert manifest["config_hash"] == hashlib.sha256(b"seed: 0\n").hexdigest()
    present = {p.relative_to(path).as_posix(): p for p in path.rglob("*") if p.is_file() and p.name != "manifest.json"}
    assert manifest["files"] == {
        name: {"size": len(p.read_bytes()), "sha256": hashlib.sha256(p.read_bytes()).hexdigest()} for name, p in present.items()
    }


def test_due():
    checkpoints = manager("nowhere", every=3)
    assert [step for step in range(1, 10) if checkpoints.due(step)] == [3, 6, 9]
    assert not any(manager("nowhere", every=None).due(step) for step in range(10))
    assert checkpoints.latest() is None


def test_retention_keeps_the_newest_and_the_best(tmp_path):
    checkpoints = manager(tmp_path, keep=2)
    root = tmp_path / "checkpoints"
    kept = []
    for step, metric in [(1, None), (2, 3.0), (3, 1.0), (4, 2.0), (5, float("nan")), (6, 1.0), (7, 4.0)]:
        checkpoints.save(step, Weights(), {}, metric=metric)
        kept.append([int(name[-1]) for name in names(root) if name.startswith("step-")])
    # Of equals the earliest is the best; a metric that is not a number is none.
    assert kept == [[1], [1, 2], [2, 3], [3, 4], [3, 4, 5], [3, 5, 6], [3, 6, 7]]
    assert (root / "best").read_text() == "step-000003\n" and (root / "latest").read_text() == "step-000007\n"
    save(tmp_path, 8, keep=1, keep_best=False)
    assert names(root) == ["latest", "step-000008"]


def test_going_back_in_a_run_makes_the_new_saves_the_newest(tmp_path):
    root = save(tmp_path, 2, 4, 6, keep=3)
    (root / "latest").write_text("step-000002\n")
    assert manager(tmp_path).latest().name == "step-000002"
    save(tmp_path, 4, keep=3)
    (root / "latest").unlink()
    assert manager(tmp_path).latest().name == "step-000004"
    assert names(root) == ["step-000002", "step-000004", "step-000006"]
    save(tmp_path, 5, keep=2)
    assert names(root) == ["latest", "step-000004", "step-000005"]


def test_failed_save_leaves_nothing_and_the_last_one_stays(tmp_path):
    root = save(tmp_path, 2)

    class Failing(Weights):
        def save_state(self, writer, save_optimizer=True):
            super().save_state(writer)
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        manager(tmp_path).save(4, Failing(), {})
    with pytest.raises(ValueError, match="JSON"):
        manager(tmp_path).save(4, Weights(), {"loss": float("nan")})
    assert names(root) == ["latest", "step-000002"] and manager(tmp_path).latest().name == "step-000002"


def test_full_disk_says_so(tmp_path):
    root = save(tmp_path, 2)

    class Full(Weights):
        def save_state(self, writer, save_optimizer=True):
            with open("/dev/full", "wb", buffering=0) as file:
                file.write(b"x")

    with pytest.raises(
        CheckpointError, match="step-000004 could not be written: No space left on device.*Earlier checkpoints are untouched"
    ):
        manager(tmp_path).save(4, Full(), {})
    assert names(root) == ["latest", "step-000002"]


def test_pickle_files_are_never_written(tmp_path):
    class Pickling(Weights):
        def save_state(self, writer, save_optimizer=True):
            writer.add_files("model", lambda path: torch.save({}, path / "training_args.bin"))
            return {}

    with pytest.raises(CheckpointError, match="training_args.bin' is refused"):
        manager(tmp_path).save(2, Pickling(), {})
    assert names(tmp_path / "checkpoints") == []


@pytest.mark.parametrize("background", [False, True])
def test_other_ranks_take_part_and_write_nothing(tmp_path, background):
    checkpoints = CheckpointManager(RunFolder(tmp_path), CheckpointConfig(background=background), Runtime(rank=1))
    assert checkpoints.save(2, Weights(), {}) == tmp_path / "checkpoints" / "step-000002"
    checkpoints.wait()
    assert list(tmp_path.iterdir()) == []


# --- in the background ----------------------------------------------------------------------------------------------


def test_background_save_is_of_the_moment_it_was_asked_for(tmp_path):
    gate = threading.Event()

    class Slow(Weights):
        def save_state(self, writer, save_optimizer=True):
            writer._pending.append(gate.wait)  # holds the writing thread
            return super().save_state(writer)

    checkpoints = manager(tmp_path, background=True)
    model = Slow(7.0)
    path = checkpoints.save(2, model, {"step": 2})
    assert checkpoints.latest() is None and not path.exists()
    for tensor in model.tensors.values():
        tensor.zero_()  # training goes on
    gate.set()
    checkpoints.wait()
    assert checkpoints.latest() == path
    assert CheckpointReader(path).tensors("model")["layer.1.weight"].tolist() == [8.0] * 8
    assert CheckpointReader(path).tensors("optimizer")["layer.1.weight"].tolist() == [8.0] * 8


def test_background_equals_foreground(tmp_path):
    for name in ("front", "back"):
        checkpoints = manager(tmp_path / name, background=name == "back", keep=1)
        for step in (1, 2, 3):
            checkpoints.save(step, Weights(step), {"step": step})
        checkpoints.wait()
    files = [
        {p.relative_to(tmp_path / n): p.read_bytes() for p in (tmp_path / n).rglob("*") if p.is_file()} for n in ("front", "back")
    ]
    assert files[0] == files[1] and len(files[0]) == 9


def test_background_error_surfaces(tmp_path):
    checkpoints = manager(tmp_path, background=True)
    checkpoints.save(2, Weights(), {})
    checkpoints.wait()

    class Failing(Weights):
        def save_state(self, writer, save_optimizer=True):
            writer._pending.append(lambda: (_ for _ in ()).throw(OSError(28, "No space left on device")))
            return {}

    checkpoints.save(4, Failing(), {})
    with pytest.raises(CheckpointError, match="No space left"):
        checkpoints.save(6, Weights(), {})
    checkpoints.save(6, Weights(), {})
    checkpoints.wait()
    checkpoints.wait()
    assert names(tmp_path / "checkpoints") == ["latest", "step-000002", "step-000006"]


# --- S20: which one to continue from --------------------------------------------------------------------------------


def cut(path):
    weights = path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])


def flip(path):
    weights = path / "model" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)


def unfinished(path):
    (path / "manifest.json").unlink()
    (path / "trainer_state.json").unlink()
    path.rename(path.with_name(path.name + ".tmp"))


DAMAGE = {
    "weights cut": (cut, "model/model.safetensors has"),
    "weights flipped": (flip, "model/model.safetensors is damaged"),
    "trainer state missing": (lambda path: (path / "trainer_state.json").unlink(), "trainer_state.json is missing"),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), "unfinished save"),
    "half a manifest": (lambda path: (path / "manifest.json").write_text('{"format": "twi'), "manifest.json is damaged"),
    "empty": (lambda path: [shutil.rmtree(path), path.mkdir()], "unfinished save"),
    "still named tmp": (unfinished, "is not finished"),
    "shard missing": (lambda path: next(path.glob("optimizer/*-00002-*")).unlink(), "00002-of-00003.safetensors is missing"),
}


@pytest.mark.parametrize("pointer", ["step-000002", "step-000004", None])
@pytest.mark.parametrize("kind", DAMAGE)
def test_crash_in_the_middle_of_a_save(tmp_path, caplog, kind, pointer):
    damage, message = DAMAGE[kind]
    root = save(tmp_path, 2, 4)
    damage(root / "step-000004")
    if pointer:
        (root / "latest").write_text(pointer)
    else:
        (root / "latest").unlink()
    with caplog.at_level(logging.WARNING):
        found = manager(tmp_path).latest()
    assert found == root / "step-000002"
    if not (kind == "weights flipped" and pointer == "step-000002"):  # one that is not looked for is not hashed
        assert any(
            "step-000004" in r.message and message in r.message and "step-000002 is used" in r.message for r in caplog.records
        )
    save(tmp_path, 4)
    assert manager(tmp_path).latest() == root / "step-000004"
    CheckpointReader(root / "step-000004").verify()
    assert names(root) == ["latest", "step-000002", "step-000004"]


def test_unfinished_first_save_means_starting_anew_but_damage_does_not(tmp_path, caplog):
    root = save(tmp_path, 2)
    shutil.copytree(root / "step-000002", root / "step-000004")
    unfinished(root / "step-000002")
    shutil.rmtree(root / "step-000004")
    (root / "latest").unlink()
    assert manager(tmp_path).latest() is None
    assert "step-000002.tmp is not finished" in caplog.text
    save(tmp_path, 2)
    flip(root / "step-000002")
    with pytest.raises(CheckpointError, match="no whole checkpoint is left: .*step-000002 is damaged: model/model.safetensors"):
        manager(tmp_path).latest()
    assert manager(tmp_path).latest(verify="size").name == "step-000002"


def test_pointer_to_nothing_falls_back(tmp_path, caplog):
    root = save(tmp_path, 2, 4)
    (root / "latest").write_text("step-000009\n")
    assert manager(tmp_path).latest().name == "step-000004"
    assert "names step-000009, which is not there" in caplog.text


def test_weights_alone_are_nothing_to_continue_from(tmp_path):
    with CheckpointWriter(tmp_path / "checkpoints", "step-000003", step=3, backend="transformers") as writer:
        Weights().save_state(writer)
    with pytest.raises(CheckpointError, match="has no trainer_state.json"):
        manager(tmp_path).latest()


def test_damaged_ones_do_not_count_as_kept(tmp_path):
    root = save(tmp_path, 2, 4, keep=2)
    cut(root / "step-000004")
    save(tmp_path, 6, keep=2)
    assert names(root) == ["latest", "step-000002", "step-000006"]


def test_newest_checkpoint_of_any_path(tmp_path):
    root = save(tmp_path, 2, 4)
    assert (
        newest_checkpoint(tmp_path) == newest_checkpoint(root) == newest_checkpoint(root / "step-000004") == root / "step-000004"
    )
    assert newest_checkpoint(root / "step-000002") == root / "step-000002"
    flip(root / "step-000002")
    with pytest.raises(CheckpointError, match="damaged"):
        newest_checkpoint(root / "step-000002")
    with pytest.raises(CheckpointError, match="no such folder"):
        newest_checkpoint(tmp_path / "none")


def test_newer_one_than_latest_names_is_reported(tmp_path, caplog):
    root = save(tmp_path, 2, 4)
    publish_latest(root, "step-000002")
    assert manager(tmp_path).latest() == root / "step-000002"
    assert "step-000004 is newer, but 'latest' does not name it" in caplog.text


# --- S22 ------------------------------------------------------------------------------------------------------------


def test_missing_optimizer_state_is_loud(tmp_path):
    manager(tmp_path).save(2, Weights(optimizer=False), {})
    reader = CheckpointReader(manager(tmp_path).latest())
    assert not reader.has("optimizer") and reader.has("model")
    with pytest.raises(CheckpointError, match="holds no 'optimizer'"):
        reader.tensors("optimizer")


# --- S33: pickle ----------------------------------------------------------------------------------------------------


class Trap:
    """Unpickling it makes a file."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return (open, (str(self.marker), "w"))


@pytest.fixture
def trap(tmp_path):
    path = tmp_path / "trap.pt"
    torch.save(Trap(tmp_path / "marker"), path)
    return path.read_bytes()


RESUMED = [
    "manifest.json",
    "trainer_state.json",
    "model/model.safetensors",
    "model/config.json",
    "optimizer/optimizer.safetensors.index.json",
    "optimizer/optimizer-00001-of-00003.safetensors",
    "latest",
]


@pytest.mark.parametrize("honest", [True, False], ids=["hash kept", "hash forged"])
@pytest.mark.parametrize("name", RESUMED)
def test_pickle_in_place_of_any_file_of_the_resume_path(tmp_path, trap, name, honest):
    root = save(tmp_path / "run", 2)
    path = root / "step-000002"
    target = root / name if name == "latest" else path / name
    target.write_bytes(trap)
    if not honest and name not in ("manifest.json", "latest"):
        manifest = json.loads((path / "manifest.json").read_text())
        manifest["files"][name] = {"size": len(trap), "sha256": hashlib.sha256(trap).hexdigest()}
        (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError):
        reader = CheckpointReader(manager(tmp_path / "run").latest())
        reader.json("trainer_state.json")
        reader.json("model/config.json")
        for part in ("model", "optimizer"):
            dict(reader.tensors(part))
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize(
    "name",
    ["optimizer/optimizer.pt", "rng.pth", "scheduler.pkl", "model/pytorch_model.bin", "x/y.ckpt", "model/training_args.BIN"],
)
@pytest.mark.parametrize("listed", [True, False])
def test_pickle_beside_the_files_is_refused_by_name(tmp_path, trap, name, listed):
    """No falling back to an older checkpoint here: somebody has put something into this one."""
    root = save(tmp_path / "run", 2, 4)
    path = root / "step-000004"
    (path / name).parent.mkdir(exist_ok=True)
    (path / name).write_bytes(trap)
    if listed:
        manifest = json.loads((path / "manifest.json").read_text())
        manifest["files"][name] = {"size": len(trap), "sha256": hashlib.sha256(trap).hexdigest()}
        (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=f"{name.split('/')[-1]}' is refused: pickle files can run code"):
        manager(tmp_path / "run").latest()
    assert not (tmp_path / "marker").exists()


def test_pickle_where_tensors_are_expected(tmp_path, trap):
    from twinkle_research.checkpoint.format import TensorFolder

    (tmp_path / "adapter_model.bin").write_bytes(trap)
    with pytest.raises(CheckpointError, match="adapter_model.bin' is refused"):
        TensorFolder(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "adapter_model.bin"}}')
    for follow in (True, False):
        with pytest.raises(CheckpointError, match="adapter_model.bin' is refused"):
            TensorFolder(tmp_path, follow_links=follow)
    assert not (tmp_path / "marker").exists()
