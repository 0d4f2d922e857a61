"""One process, DDP and FSDP2 train the same and continue each other, whatever is trained and however rows are cut.

The measured distances are printed by ``pytest -s``. Everything runs in one launch of two processes.
"""

import layout_worker as worker
import pytest
import torch
from layout_worker import CASES, KINDS, LAYOUTS, kind_name, metrics_of, tensors_of
from ranks import launch
from test_architectures import ARCHITECTURES
from test_architectures import build as build_architecture
from tiny_models import relative_distance

from twinkle_research.checkpoint.stream import TensorFolder
from twinkle_research.model.transformers import TransformersModel
from twinkle_research.model.transformers.names import DiskNames

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def folders(once):
    def make(folder):
        for name in ARCHITECTURES:
            build_architecture(name).save_pretrained(folder / name)

    return once("architectures", make)


@pytest.fixture(scope="module")
def out(once, tiny_llama, folders):
    return once("layouts", lambda folder: launch("layout_worker", tiny_llama, folders, folder))


def check(what, found, expected, tensors, *, loss, norm, distance):
    """Of metrics and of weights (with moments); the other metrics are exactly equal. Prints what it measures."""
    gaps = [max(abs(a[key] / b[key] - 1) if b[key] else abs(a[key]) for a, b in zip(found, expected, strict=True))
            for key in ("loss", "grad_norm")]  # fmt: skip
    gaps.append(relative_distance(*tensors))
    print("{}: loss {:.1e}, gradient norm {:.1e}, weights {:.1e}".format(what, *gaps))
    assert gaps[0] <= loss and gaps[1] <= norm and gaps[2] <= distance
    rest = [[{key: row[key] for key in row if key not in ("loss", "grad_norm")} for row in rows] for rows in (found, expected)]
    assert rest[0] == rest[1]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_update_depends_on_nothing_but_the_rows(out, case):
    """Compared with padded rows in one process, without checkpointing. Measured: losses 2.1e-7, gradient norms 1.1e-6,
    weights 5.2e-8 after the first update and 3.1e-7 after the last."""
    reference = worker.Case(case.lora, packing=False, by_hand=case.by_hand, checkpointing=False, layout="none")
    (expected,) = results(out, reference)
    found = results(out, case)
    assert len(found) == (1 if case.layout == "none" else 2)
    for stem in found:
        assert len(metrics_of(stem)) == (6 if case.by_hand else 10)
        for when in ("first", "last"):
            tensors = tensors_of(f"{expected}-{when}"), tensors_of(f"{stem}-{when}")
            check(f"{case} {when}", metrics_of(stem), metrics_of(expected), tensors, loss=1e-5, norm=1e-5, distance=1e-6)
            assert worker.same(tensors[1], tensors_of(f"{found[0]}-{when}"))


def results(out, case):
    stems = [out / "matrix" / f"{case}-{rank}" for rank in range(2)]
    return [stem for stem in stems if stem.with_name(f"{stem.name}.json").exists()]


@pytest.mark.parametrize("read", LAYOUTS)
@pytest.mark.parametrize("written", LAYOUTS)
@pytest.mark.parametrize(("lora", "dtype"), KINDS, ids=str)
def test_any_layout_continues_any_other(out, lora, dtype, written, read):
    """Under the layout that wrote it with the same bits; under another, packed instead of padded. Measured: losses 1.4e-7,
    gradient norms 2e-7, weights and moments 6.6e-8. In bfloat16, where a gradient is rounded once a micro-batch, 2.2e-4,
    1.4e-3 and 8.3e-4 (a LoRA is kept in float32 and differs no more than there)."""
    stem = out / "resumes" / kind_name(lora, dtype)
    whole, resumed = f"{stem}-{written}-whole", f"{stem}-{written}-{read}"
    tensors = tensors_of(whole), tensors_of(resumed)
    rounded = dtype == "bfloat16" and not lora
    bounds = {"loss": 1e-3, "norm": 5e-3, "distance": 3e-3} if rounded else {"loss": 1e-5, "norm": 1e-5, "distance": 1e-6}
    check(f"{written} {read}", metrics_of(resumed), metrics_of(whole), tensors, **bounds)
    if written == read:
        assert metrics_of(whole) == metrics_of(resumed) and worker.same(*tensors)
    slots = {name.rpartition(".")[2]: tensor.dtype for name, tensor in tensors[1].items()}
    assert slots["exp_avg"] == slots["exp_avg_sq"] == torch.float32
    assert slots["weight"] == (torch.bfloat16 if rounded else torch.float32)
    assert slots.get("master") == (torch.float32 if rounded else None)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_is_sharded(out, folders, name):
    """The ranks themselves have compared what they loaded with from_pretrained, and what they saved with what they read
    back. Measured: losses 9.9e-8, gradient norms 1.2e-6, weights and moments 4.5e-8."""
    model = worker.with_optimizer(TransformersModel(folders / name))
    expected = worker.steps(model, range(2))
    stem = out / "architectures" / f"{name}-stepped"
    tensors = worker.everything(model), tensors_of(stem)
    check(name, metrics_of(stem), expected, tensors, loss=1e-5, norm=1e-5, distance=1e-6)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_weights_come_and_go_one_by_one(folders, name):
    """Also the experts of a mixture, each a stack in memory and one by one on disk."""
    module = TransformersModel(folders / name).module
    weights = dict(module.named_parameters())
    names = DiskNames(module, {name: p.shape for name, p in weights.items()})
    asked, written, read = [], [], []
    for on_disk, tensor in names.to_disk(lambda name: asked.append(name) or weights[name], weights):
        assert on_disk in names.of(asked[-1])
        written.append((on_disk, tensor.numel()))
    assert asked == list(weights)
    assert sum(size for _, size in written) == sum(p.numel() for p in weights.values())

    class Folder(TensorFolder):
        def _handle(self, name):
            read.append(name)
            return super()._handle(name)

    for name_in_memory, tensor in names.parts_from_disk(Folder(folders / name), weights, lambda name: slice(None)):
        assert sorted(read) == sorted(names.of(name_in_memory))
        assert torch.equal(tensor, weights[name_in_memory])
        read.clear()
    if name == "qwen3_moe":
        assert len(written) > len(weights)


def test_muon_is_refused_where_matrices_are_cut(out):
    for rank in range(2):
        assert "optimizer=muon needs whole matrices" in (out / "refusals" / str(rank)).read_text()
