"""Each family's own parts give the losses, scores, gradients and updates of transformers and PEFT, in every layout.

The measured distances are printed by ``pytest -s``. One launch for each number of processes.
"""

import json

import families_worker as worker
import pytest
from families_worker import LAYOUTS
from lora_worker import BOUNDS
from ranks import launch

from twinkle_research.distributed.runtime import Runtime

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def measured(once):
    """World size -> folder with the distances of each layout and process."""

    def run(size):
        def make(out):
            (out / "expected").mkdir()
            worker.references(out, out / "expected", {layout.model for layout in LAYOUTS[size].values()})
            arguments = (out, out / "expected", out)
            if size == 1:
                worker.main(Runtime(), *map(str, arguments))
            else:
                launch("families_worker", *arguments, processes=size, forked=True)

        return once(f"megatron-families-{size}", make)

    return run


def cases():
    for size, layouts in LAYOUTS.items():
        yield from (pytest.param(size, name, marks=[pytest.mark.long] if size > 1 else []) for name in layouts)


@pytest.mark.parametrize(("size", "layout"), cases())
def test_as_transformers_and_peft(measured, size, layout):
    for rank in range(size):
        found = json.loads((measured(size) / f"{layout}-{rank}.json").read_text())
        for kind, full in found["full"].items():
            print(layout, rank, kind, {name: f"{value:.1e}" for name, value in full.items()})
            assert full["gradients"] <= 1e-6 and full["metrics"] <= 2e-6 and max(full["logps"], full["loss"]) <= 2e-6
        print(layout, rank, "lora", {name: f"{value:.1e}" for name, value in found["lora"].items()})
        assert all(value <= BOUNDS[name] for name, value in found["lora"].items()) and len(found["lora"]) == len(BOUNDS)
