"""A real model: one optimizer step of SmolLM2-135M on Megatron-Core is that of transformers."""

import json

import pytest
import smollm2_worker as worker
from equality_worker import PROMISED
from ranks import launch

from twinkle_research.model.prepare import prepare

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def done(once):
    def make(out):
        folder = prepare("smollm2_135m")
        worker.reference(folder, out / "expected")
        for size in worker.LAYOUTS:
            launch("smollm2_worker", folder, out / "expected", out, processes=size, forked=True, seconds=500)
        (out / "expected.safetensors").unlink()  # half a gigabyte

    return once("megatron-smollm2", make)


@pytest.mark.parametrize(("size", "layout"), [(size, name) for size in worker.LAYOUTS for name in worker.LAYOUTS[size]])
def test_one_step(done, size, layout):
    for rank in range(size):
        gaps = json.loads((done / f"{layout}-{rank}.json").read_text())
        print(layout, rank, {name: f"{gap:.1e}" for name, gap in gaps.items()})
        assert all(gap <= PROMISED[name] for name, gap in gaps.items())
