"""A checkpoint goes on in any layout of either backend: with the bits that it has, and with the losses that it would have had.

The measured distances are printed by ``pytest -s``. One launch saves in the layouts of up to two processes; one of four saves
and resumes; one resumes in those of up to two.
"""

import json

import pytest
import torch
from equality_cases import make_folder
from hf_folders import bits
from ranks import launch
from resume_worker import AFTER, CLIP, PAIRS, goes_on
from training_cases import stored

from twinkle_research.checkpoint.format import CheckpointReader
from twinkle_research.model.saving import TRAINER_STATE

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
RUNS = [(name, *pair) for name, pairs in PAIRS.items() for pair in pairs]
ON = [run for run in RUNS if goes_on(*run)]


@pytest.fixture(scope="module")
def out(once):
    def make(folder):
        make_folder("mixture-tied", folder / "of-the-model")
        for size, parts in ((2, ["save"]), (4, ["save", "resume"]), (2, ["resume"])):
            launch("resume_worker", folder / "of-the-model", folder, *parts, processes=size, seconds=550)

    return once("megatron-resume", make)


def metrics_of(out, name):
    return json.loads((out / f"{name}.json").read_text())


def same_bits(a, b):
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(bits(a[n]), bits(b[n])) for n in a)


@pytest.mark.parametrize(("kind", "written", "read"), RUNS, ids=str)
def test_what_is_read_is_saved_again(out, kind, written, read):
    """Bit for bit, with where training is."""
    first, second = out / f"{kind}-{written}", out / f"{kind}-{written}-{read}-again"
    assert same_bits(stored(first), stored(second))
    assert CheckpointReader(first).json(TRAINER_STATE) == CheckpointReader(second).json(TRAINER_STATE)


@pytest.mark.parametrize(("kind", "written", "read"), ON, ids=str)
def test_training_goes_on(out, kind, written, read):
    """In the same layout with the same bits. In another one with losses to 1e-5, gradient norms and weights to 1e-4. Measured:
    losses 9.5e-7, gradient norms 2.1e-7, weights 1.2e-7."""
    whole, resumed = (f"{kind}-{written}-{name}" for name in ("whole", read))
    expected, found = metrics_of(out, whole), metrics_of(out, resumed)
    assert len(found) == len(expected)
    last = [metrics for metrics in found if "grad_norm" in metrics]
    assert len(last) == AFTER and all(metrics["grad_norm"] > CLIP for metrics in last)
    ends = [stored(out / f"{name}-end") for name in (resumed, whole)]
    if written == read:
        assert found == expected
        assert same_bits(*ends)
        return
    gaps = distances(found, expected) | {"weights": largest_distance(*ends)}
    print(kind, written, read, {name: f"{gap:.1e}" for name, gap in gaps.items()})
    assert gaps["loss"] <= 1e-5
    assert gaps["grad_norm"] <= 1e-4
    assert gaps["weights"] <= 1e-4


def distances(found, expected):
    """The largest of losses, absolute, and of gradient norms, relative. What else is measured is equal."""
    gaps = dict.fromkeys(("loss", "grad_norm"), 0.0)
    for a, b in zip(found, expected, strict=True):
        gaps["loss"] = max(gaps["loss"], abs(a["loss"] - b["loss"]))
        if "grad_norm" in b:
            gaps["grad_norm"] = max(gaps["grad_norm"], abs(a["grad_norm"] / b["grad_norm"] - 1))
        assert a | {name: b[name] for name in gaps.keys() & b.keys()} == b
    return gaps


def largest_distance(found, expected):
    """Of a weight or a master; and no tensor is left out."""
    assert found.keys() == expected.keys()
    return max(float((found[name] - expected[name]).abs().max()) for name in found if "exp_avg" not in name)
