"""A value head, a reference and several adapters in one process, under DDP and under FSDP2: the same, and each resumes from
each. Everything runs in one launch of two processes."""

import json
from itertools import product

import pytest
import torch
from companion_worker import CASES, LAYOUTS
from ranks import launch
from safetensors.torch import load_file
from tiny_models import relative_distance

pytestmark = pytest.mark.long

# Of weights, values and the reference's log-probabilities, relative L2. bfloat16 rounds what layouts sum in another order.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}


@pytest.fixture(scope="module")
def out(tiny_llama, tmp_path_factory):
    out = tmp_path_factory.mktemp("companions")
    launch("companion_worker", tiny_llama, out)
    return out


def found(out, name, layout):
    """(weights, values, reference log-probabilities), rows in the order of the global batch."""
    ranks = [0] if layout == "none" else [0, 1]
    weights = [load_file(out / f"{name}-{rank}.safetensors") for rank in ranks]
    assert all(torch.equal(weights[0][key], other[key]) for other in weights for key in weights[0])
    said = {}
    for rank in ranks:
        said |= json.loads((out / f"{name}-{rank}.json").read_text())
    columns = zip(*[said[str(number)] for number in range(len(said))], strict=True)
    values, reference = ({"all": torch.tensor([v for row in column for v in row])} for column in columns)
    return weights[0], values, reference


def distance(a, b):
    return max(relative_distance(*pair) for pair in zip(a, b, strict=True))


@pytest.mark.parametrize(("kind", "dtype"), CASES)
@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_the_same_in_every_layout(out, layout, kind, dtype):
    one, several = (found(out, f"end-{which}-{kind}-{dtype}", which) for which in ("none", layout))
    gap = distance(one, several)
    print(f"{layout} {kind} {dtype}: {gap:.1e}")
    assert gap <= TOLERANCE[dtype]


@pytest.mark.parametrize("kind", ["full", "lora"])
@pytest.mark.parametrize(("source", "target"), product(LAYOUTS, LAYOUTS))
def test_each_resumes_from_each(out, source, target, kind):
    uninterrupted = found(out, f"end-{target}-{kind}-float32", target)
    resumed = found(out, f"resumed-{source}-{target}-{kind}", target)
    assert distance(uninterrupted, resumed) <= (0 if source == target else TOLERANCE["float32"])


@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_adapters_on_one_base_are_as_alone(out, layout):
    for rank in range(2):
        results = json.loads((out / f"adapters-{layout}-{rank}.json").read_text())
        for name in ("a", "b"):
            assert results[f"{name}-together"] == results[f"{name}-alone"]
