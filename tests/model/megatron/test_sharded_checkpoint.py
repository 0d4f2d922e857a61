"""checkpoint.format=sharded: processes that each write their parts, read in any layout, and as whole tensors."""

import pytest
import sharded_worker
from hf_folders import save_models
from ranks import launch
from sharded_worker import LAYOUTS, WRITTEN, readings
from training_cases import KINDS, MODELS, SHAPE, everything, same, set_up, stored

from twinkle_research.checkpoint.convert import consolidate
from twinkle_research.checkpoint.format import CheckpointReader
from twinkle_research.distributed.runtime import Runtime
from twinkle_research.model.transformers import TransformersModel

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
READ = [(kind, written, name) for size in LAYOUTS for kind, written, name, _ in readings(size)]


@pytest.fixture(scope="module")
def folders(once):
    return once("megatron-sharded-folders", lambda out: save_models(out, MODELS, SHAPE))


@pytest.fixture(scope="module")
def done(once, folders):
    def make(out):
        sharded_worker.main(Runtime(), str(folders), str(out), "write")
        launch("sharded_worker", folders, out, "write", "read", processes=4)
        launch("sharded_worker", folders, out, "write", "read", processes=2)
        sharded_worker.main(Runtime(), str(folders), str(out), "read")

    return once("megatron-sharded", make)


@pytest.mark.parametrize(("kind", "written", "read"), READ, ids=str)
def test_read_in_another_layout(done, kind, written, read):
    """The processes have compared bits: weights, moments, masters, value head, reference, open window; in the layout that wrote
    them also the update that ends the window, and the next."""
    assert (done / f"{written}-{kind}-{read}.read").exists()


@pytest.mark.parametrize(("written", "kind"), WRITTEN, ids=str)
def test_converted(done, written, kind, tmp_path):
    """Byte for byte the files that are written with checkpoint.format=consolidated."""
    whole = CheckpointReader(done / f"{written}-{kind}-whole")
    converted = CheckpointReader(consolidate(done / f"{written}-{kind}", tmp_path / "whole"))
    assert converted.manifest.files == whole.manifest.files
    assert converted.manifest.layout == whole.manifest.layout


@pytest.mark.parametrize("written", ["tp2-dp2-zero", "dp2-zero"])
def test_replicas_share_the_work(done, written):
    """No process writes much more than its share, and none what another one writes."""
    reader = CheckpointReader(done / f"{written}-tied")
    for folder in ("model", "optimizer"):
        sizes = [entry["size"] for name, entry in reader.manifest.files.items() if name.startswith(f"{folder}/{folder}.part-")]
        whole = CheckpointReader(done / f"{written}-tied-whole").manifest.files[f"{folder}/{folder}.safetensors"]["size"]
        assert len(sizes) == reader.manifest.layout["world_size"] and max(sizes) < 1.3 * whole / len(sizes)
        assert sum(sizes) < 1.3 * whole  # headers are much of so small a file


@pytest.mark.parametrize("converted", [False, True])
@pytest.mark.parametrize(
    ("written", "kind"), [("tp2-dp2-zero", "tied"), ("tp2", "lora"), ("pp2", "companions"), ("ep2", "mixture")]
)
def test_transformers_goes_on(done, folders, written, kind, converted, tmp_path):
    source = done / f"{written}-{kind}"
    if converted:
        source = consolidate(source, tmp_path / "whole")
    model = set_up(TransformersModel(folders / KINDS[kind].model, dtype=KINDS[kind].dtype), KINDS[kind], 2)
    model.resume_from_checkpoint(source)
    assert same(everything(model), stored(done / f"{written}-{kind}-whole"))
