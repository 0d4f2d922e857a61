"""A real model: one optimizer step of SmolLM2-135M on Megatron-Core is that of transformers."""

import json

import pytest
import smollm2_worker as worker
from equality_worker import PROMISED
from ranks import launch

from twinkle_research.model.prepare import prepare

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
# A single token's log-probability after 30 layers in float32: transformers' two attention kernels differ by 1.5e-5 on these rows,
# and are 1.0e-5 and 1.8e-5 from what it gives in float64.
BOUNDS = PROMISED | {"logps": 4e-5}


@pytest.fixture(scope="module")
def done(once):
    def make(out):
        folder = prepare("smollm2_135m")
        worker.reference(folder, out / "expected")
        for size in worker.LAYOUTS:
            launch("smollm2_worker", folder, out / "expected", out, processes=size, seconds=500)
        (out / "expected.safetensors").unlink()  # half a gigabyte

    return once("megatron-smollm2", make)


@pytest.mark.parametrize(("size", "layout"), [(size, name) for size in worker.LAYOUTS for name in worker.LAYOUTS[size]])
def test_one_step(done, size, layout):
    """Measured: losses 1.4e-6, gradient norms 1.7e-5, log-probabilities 2.1e-5, weights 4.4e-5."""
    for rank in range(size):
        gaps = json.loads((done / f"{layout}-{rank}.json").read_text())
        print(layout, rank, {name: f"{gap:.1e}" for name, gap in gaps.items()})
        assert all(gap <= BOUNDS[name] for name, gap in gaps.items())
