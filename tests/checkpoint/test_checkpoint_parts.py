"""Checkpoints that each process writes its parts of (checkpoint.format=sharded). Processes are threads here; in
tests/model/megatron/test_sharded_checkpoint.py they are real."""

import errno
import json
import shutil
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from children import peak_growth_mib
from safetensors.torch import load_file

from twinkle_research.checkpoint import sharded
from twinkle_research.checkpoint.__main__ import main
from twinkle_research.checkpoint.config import CheckpointConfig, CheckpointFormat
from twinkle_research.checkpoint.convert import consolidate
from twinkle_research.checkpoint.format import CheckpointReader, CheckpointWriter, TensorSpec
from twinkle_research.checkpoint.manager import CheckpointManager
from twinkle_research.checkpoint.parts import PartedFolder, PartedTensor
from twinkle_research.checkpoint.sharded import ShardedWriter
from twinkle_research.checkpoint.stream import TensorFolder
from twinkle_research.distributed.runtime import Runtime
from twinkle_research.errors import CheckpointError, ConfigError
from twinkle_research.trainer.rundir import RunFolder

TENSORS = {
    "matrix": torch.arange(77, dtype=torch.float32).view(7, 11),
    "columns": torch.arange(60, dtype=torch.float32).view(5, 12).to(torch.bfloat16),
    "cube": torch.arange(120, dtype=torch.int64).view(4, 5, 6),
    "norm": torch.tensor([float("nan"), -0.0, 1e-45]),
    "scalar": torch.tensor(7.5),
}
BOXES = {
    "matrix": {2: ((0, 3), (0, 11)), 0: ((3, 7), (0, 11))},
    "columns": {0: ((0, 5), (0, 7)), 1: ((0, 5), (7, 12))},
    "cube": {0: ((0, 2), (0, 5), (0, 4)), 1: ((0, 2), (0, 5), (4, 6)), 2: ((2, 4), (0, 5), (0, 6))},
    "norm": {1: ((0, 3),)},
    "scalar": {2: ()},
}
RANKS = 3


@dataclass
class Together(Runtime):
    """One of three ranks, which are threads of this process."""

    barrier_: threading.Barrier = field(default_factory=lambda: threading.Barrier(RANKS, timeout=20))
    box: list = field(default_factory=lambda: [None] * RANKS)

    def gather_objects(self, value):
        self.box[self.rank] = value
        self.barrier_.wait()
        found = list(self.box)
        self.barrier_.wait()
        return found

    def apart(self):
        return self

    def barrier(self):
        self.gather_objects(None)


def in_threads(work) -> list:
    """What ``work`` returns, or raises, on each rank."""
    first = Together(0, RANKS)
    runtimes = [first, *(Together(rank, RANKS, barrier_=first.barrier_, box=first.box) for rank in range(1, RANKS))]
    found = [None] * RANKS

    def run(runtime):
        try:
            found[runtime.rank] = work(runtime)
        except CheckpointError as error:
            found[runtime.rank] = error

    threads = [threading.Thread(target=run, args=(runtime,)) for runtime in runtimes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def parted(suffix=""):
    return [PartedTensor(TensorSpec.of(name + suffix, TENSORS[name]), BOXES[name]) for name in TENSORS]


def own(runtime, suffix=""):
    for name, boxes in BOXES.items():
        if (box := boxes.get(runtime.rank)) is not None:
            yield name + suffix, TENSORS[name][tuple(slice(a, b) for a, b in box)]


class Model:
    backend = "megatron"
    layout = {"world_size": RANKS}

    def __init__(self, runtime):
        self.runtime = runtime

    def save_state(self, writer):
        writer.add_parts("model", "model", parted(), own(self.runtime))
        writer.add_parts("optimizer", "optimizer", parted(".exp_avg"), own(self.runtime, ".exp_avg"))
        writer.add_json("model/config.json", {})
        return {"cur_step": 2}


def save(run: Path, step: int = 2, background: bool = False, wrong=None) -> list:
    def work(runtime):
        settings = CheckpointConfig(background=background, format=CheckpointFormat.sharded, keep=5)
        manager = CheckpointManager(RunFolder(run), settings, runtime)
        if wrong is not None:
            wrong(runtime)
        path = manager.save(step, Model(runtime), {"step": step})
        manager.wait()
        return path

    return in_threads(work)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    run = tmp_path_factory.mktemp("sharded")
    assert save(run) == [run / "checkpoints" / "step-000002"] * RANKS
    return run


@pytest.fixture
def copy(written, tmp_path):
    shutil.copytree(written, tmp_path / "copy")
    return tmp_path / "copy" / "checkpoints" / "step-000002"


def same_bits(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bytes(a), _bytes(b))


def _bytes(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


# --- writing and reading --------------------------------------------------------------------------------------------


def test_each_rank_writes_its_parts(written):
    folder = written / "checkpoints" / "step-000002"
    files = sorted(path.name for path in (folder / "model").iterdir())
    assert files == ["config.json", *(f"model.part-0000{i}-of-00003.safetensors" for i in (1, 2, 3)), "model.parts.json"]
    for rank in range(RANKS):
        found = load_file(folder / "model" / files[1 + rank])
        expected = {name: TENSORS[name][tuple(slice(*i) for i in box[rank])] for name, box in BOXES.items() if rank in box}
        assert found.keys() == expected.keys() and all(same_bits(found[n], expected[n]) for n in found)
    reader = CheckpointReader(folder)
    reader.verify("full")
    assert not reader.unlisted() and (written / "checkpoints" / "latest").read_text() == "step-000002\n"
    assert reader.manifest.layout == {"world_size": RANKS} and reader.json("trainer_state.json")["model"] == {"cur_step": 2}


@pytest.mark.parametrize("chunk", [None, 16])
def test_whole_tensors_rows_and_regions(written, chunk, monkeypatch):
    if chunk is not None:
        monkeypatch.setattr("twinkle_research.checkpoint.parts.CHUNK", chunk)  # of two rows, or less than one
    tensors = CheckpointReader(written / "checkpoints" / "step-000002").tensors("model", "model")
    assert isinstance(tensors, PartedFolder) and list(tensors) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert tensors.spec(name) == TensorSpec.of(name, tensor) and same_bits(tensors[name], tensor)
        if tensor.ndim:
            for rows in (slice(None), slice(1, 3), slice(2, 99), slice(0, 0)):
                assert same_bits(tensors.part(name, rows), tensor[rows])
    for index in ((slice(2, 6), slice(1, 9)), (slice(0, 3), slice(0, 11)), (slice(6, 7), slice(10, 11))):
        assert same_bits(tensors.region("matrix", index), TENSORS["matrix"][index])
    index = (slice(1, 3), slice(2, 4), slice(3, 6))
    assert same_bits(tensors.region("cube", index), TENSORS["cube"][index])


def test_torch_reads_it(written):
    """As torch.distributed.checkpoint in safetensors: parts of tensors in the header of each file."""
    from torch.distributed.checkpoint import HuggingFaceStorageReader, load

    found = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    load(found, storage_reader=HuggingFaceStorageReader(str(written / "checkpoints" / "step-000002" / "model")), no_dist=True)
    assert all(same_bits(found[name], tensor) for name, tensor in TENSORS.items())


def test_in_the_background_the_same_files(written, tmp_path):
    assert save(tmp_path, background=True) == [tmp_path / "checkpoints" / "step-000002"] * RANKS
    a, b = (CheckpointReader(run / "checkpoints" / "step-000002").manifest.files for run in (written, tmp_path))
    assert a == b


# --- what goes wrong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("background", [False, True])
def test_what_one_cannot_write_is_told_to_all(tmp_path, monkeypatch, background):
    """And the older checkpoint stays the newest."""
    save(tmp_path, 2)
    real = sharded.write_tensors

    def full(folder, specs, own, name, **options):
        if ".part-00002-" in name and name.startswith("optimizer"):
            raise OSError(errno.ENOSPC, "No space left on device", str(folder / name))
        return real(folder, specs, own, name, **options)

    monkeypatch.setattr(sharded, "write_tensors", full)
    found = save(tmp_path, 4, background)
    assert all(isinstance(error, CheckpointError) and "No space left on device" in str(error) for error in found)
    assert "written by process 1" in str(found[0]) and "Earlier checkpoints are untouched" in str(found[1])
    root = tmp_path / "checkpoints"
    assert sorted(path.name for path in root.iterdir()) == ["latest", "step-000002"]
    monkeypatch.undo()
    assert save(tmp_path, 4)[0] == root / "step-000004" and (root / "latest").read_text() == "step-000004\n"


def test_a_disk_that_is_not_shared(tmp_path, monkeypatch):
    real = Path.is_dir
    monkeypatch.setattr(Path, "is_dir", lambda path: real(path) and threading.current_thread().name != "elsewhere")

    def elsewhere(runtime):
        if runtime.rank == 2:
            threading.current_thread().name = "elsewhere"

    found = save(tmp_path, wrong=elsewhere)
    assert all("checkpoint.format=sharded needs a run_dir on a disk that all nodes share" in str(error) for error in found)


@pytest.mark.parametrize("kind", ["missing", "cut", "changed"])
def test_damaged_part(copy, kind, capsys):
    """Named, before anything is read of it."""
    file = copy / "model" / "model.part-00002-of-00003.safetensors"
    data = file.read_bytes()
    file.unlink()
    if kind != "missing":
        file.write_bytes(data[:-8] if kind == "cut" else data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"model/model\.part-00002-of-00003\.safetensors (is missing|has|is damaged)"):
        CheckpointReader(copy).verify()
    assert main(["convert", str(copy), "-o", str(copy.parent / "new")]) == 1
    assert "model.part-00002-of-00003.safetensors" in capsys.readouterr().err and not (copy.parent / "new").exists()
    if kind != "changed":
        with pytest.raises(CheckpointError, match=r"model\.part-00002-of-00003\.safetensors: (cannot be read|damaged)"):
            CheckpointReader(copy).tensors("model")["norm"]


def test_part_of_another_checkpoint(copy):
    """A whole file, but not what the index says of it."""
    shutil.copy(
        copy / "optimizer" / "optimizer.part-00001-of-00003.safetensors", copy / "model" / "model.part-00001-of-00003.safetensors"
    )
    with pytest.raises(
        CheckpointError, match=r"part-00001-of-00003\.safetensors: tensor columns is not what model\.parts\.json says"
    ):
        CheckpointReader(copy).tensors("model")["matrix"]


def entry(name, change):
    def apply(index):
        index["tensors"][name] = change(index["tensors"][name])

    return apply


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda index: index.pop("files"), "damaged index"),
        (entry("norm", lambda e: [e[0], e[1], []]), r"tensor norm of shape \(3,\): all together hold 0 of its 3 elements"),
        (entry("norm", lambda e: [e[0], e[1], e[2] * 2]), "overlap|two parts"),
        (entry("norm", lambda e: [e[0], [4], e[2]]), r"tensor norm of shape \(4,\): all together hold 3 of its 4 elements"),
        (entry("norm", lambda e: [e[0], e[1], [[1, [0], [4]]]]), r"tensor norm of shape \(3,\): .* which is no part of it"),
        (entry("norm", lambda e: [e[0], e[1], [[1, [-1], [3]]]]), "-1 is no size"),
        (entry("norm", lambda e: [e[0], e[1], [[9, [0], [3]]]]), "damaged index"),
        (entry("norm", lambda e: ["object", e[1], e[2]]), "cannot be stored"),
        (lambda index: index["files"].__setitem__(1, "../model.safetensors"), "is refused"),
        (lambda index: index["files"].__setitem__(1, "pytorch_model.bin"), "pickle"),
    ],
)
def test_index_is_not_trusted(copy, change, words):
    where = copy / "model" / "model.parts.json"
    index = json.loads(where.read_text())
    change(index)
    where.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=words):
        CheckpointReader(copy).tensors("model")["norm"]


# --- converting -----------------------------------------------------------------------------------------------------


def test_convert_gives_the_files_that_would_have_been_written(written, tmp_path, capsys):
    source = written / "checkpoints" / "step-000002"
    assert main(["convert", str(written), "-o", str(tmp_path / "whole")]) == 0
    with CheckpointWriter(tmp_path, "expected", step=2, backend="megatron", layout=Model.layout) as writer:
        for folder, suffix in (("model", ""), ("optimizer", ".exp_avg")):
            specs = [TensorSpec.of(name + suffix, tensor) for name, tensor in TENSORS.items()]
            writer.add_tensors(folder, specs, ((n + suffix, t) for n, t in TENSORS.items()), stem=folder)
        writer.add_json("model/config.json", {})
        writer.add_bytes("trainer_state.json", (source / "trainer_state.json").read_bytes())
    manifests = [CheckpointReader(tmp_path / name).manifest for name in ("whole", "expected")]
    assert manifests[0].files == manifests[1].files and manifests[0].layout == Model.layout
    assert main(["verify", str(tmp_path / "whole")]) == 0
    capsys.readouterr()
    assert main(["convert", str(tmp_path / "whole"), "-o", str(tmp_path / "again")]) == 1
    assert main(["convert", str(written), "-o", str(tmp_path / "whole")]) == 1
    error = capsys.readouterr().err
    assert "nothing to convert" in error and "exists; choose a new folder" in error


def test_converting_holds_one_tensor(tmp_path):
    """Of 24 of 8 MB, in three parts each."""
    specs = [TensorSpec(f"layer.{i}", "float32", (1024, 2048)) for i in range(24)]
    boxes = {0: ((0, 1024), (0, 1000)), 1: ((0, 500), (1000, 2048)), 2: ((500, 1024), (1000, 2048))}
    tensors = [PartedTensor(spec, boxes) for spec in specs]

    def write(runtime):
        with ShardedWriter(tmp_path, "parts", runtime=runtime, step=1, backend="megatron") as writer:
            shape = tensors[0].part_of(runtime.rank).shape
            writer.add_parts("model", "model", tensors, ((spec.name, torch.ones(shape)) for spec in specs))

    assert in_threads(write) == [None] * RANKS
    growth = peak_growth_mib(lambda: consolidate(tmp_path / "parts", tmp_path / "whole"), tmp_path / "growth")
    assert growth < 70  # MiB: the tensor, a buffer, what the allocator keeps (about 30) and what a process needs in any case
    whole = CheckpointReader(tmp_path / "whole").tensors("model")
    assert all(bool((whole[spec.name] == 1).all()) for spec in specs)


def test_other_commands(written, tmp_path, capsys):
    assert main(["verify", str(written)]) == 0 and main(["inspect", str(written)]) == 0
    assert "bfloat16 float32 int64" in capsys.readouterr().out
    assert main(["to-hf", str(written), "--dtype", "float32", "-o", str(tmp_path / "out")]) == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    out = load_file(tmp_path / "out" / "model.safetensors")
    assert out.keys() == TENSORS.keys() and same_bits(out["columns"], TENSORS["columns"].float())


def test_where_whole_tensors_are_needed(written):
    """The message has the command that makes them."""
    folder = written / "checkpoints" / "step-000002"
    for read in (
        lambda: CheckpointReader(folder).hugging_face_folder("model"),
        lambda: TensorFolder(folder / "model", "model"),
        lambda: TensorFolder(folder / "model"),
    ):
        with pytest.raises(CheckpointError, match=r"python -m twinkle_research\.checkpoint convert"):
            read()
    from twinkle_research.model.facts import weight_files

    with pytest.raises(ConfigError, match=r"python -m twinkle_research\.checkpoint convert"):
        weight_files(folder / "model")


def test_single_process(tmp_path):
    with ShardedWriter(tmp_path, "step-000001", runtime=Runtime(), step=1, backend="megatron") as writer:
        boxes = {name: {0: tuple((0, size) for size in tensor.shape)} for name, tensor in TENSORS.items()}
        tensors = [PartedTensor(TensorSpec.of(name, tensor), boxes[name]) for name, tensor in TENSORS.items()]
        writer.add_parts("model", "model", tensors, TENSORS.items())
    found = CheckpointReader(tmp_path / "step-000001").tensors("model")
    assert all(same_bits(found[name], tensor) for name, tensor in TENSORS.items())
