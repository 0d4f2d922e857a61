"""Two real gloo processes train like one (S01c, S29). They are started once for all scenarios."""

import json

import data_parallel_worker as worker
import pytest
from ranks import launch
from safetensors.torch import load_file
from tiny_models import relative_distance

from twinkle_research.distributed.runtime import Runtime
from twinkle_research.model.training import TrainingState

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def two_processes(once, tiny_llama):
    return once("data_parallel", lambda folder: launch("data_parallel_worker", tiny_llama, folder))


@pytest.fixture(scope="module")
def one_process(tiny_llama):
    return worker.run(str(tiny_llama), Runtime())


@pytest.mark.parametrize(("sharding", "name"), worker.RUNS)
def test_two_processes_train_like_one(two_processes, one_process, name, sharding):
    ranks = [load_file(two_processes / f"{sharding}-{name}-{rank}.safetensors") for rank in range(2)]
    assert all((ranks[0][key] == ranks[1][key]).all() for key in ranks[0])
    weights, metrics = one_process[name]
    assert relative_distance(weights, ranks[0]) <= (4e-3 if name.startswith("bfloat16") else 1e-6)
    seen = [json.loads((two_processes / f"{sharding}-{name}-{rank}.json").read_text()) for rank in range(2)]
    assert seen[0] == seen[1]
    for one, two in zip(metrics, seen[0], strict=True):
        assert two == pytest.approx(one, rel=2e-2 if name.startswith("bfloat16") else 1e-5)


@pytest.mark.parametrize("sharding", worker.SHARDINGS)
def test_a_window_saved_by_two_ranks_goes_on_in_one(two_processes, tiny_llama, sharding):
    model = worker.build(str(tiny_llama), Runtime(), by_hand=True, accumulation=3)
    model.resume_from_checkpoint(two_processes / f"window-{sharding}")
    alone = worker.finish(model)
    for rank in range(2):
        assert relative_distance(alone, load_file(two_processes / f"{sharding}-window-{rank}.safetensors")) <= 1e-6


@pytest.mark.parametrize("sharding", worker.SHARDINGS)
def test_one_ranks_bad_row_stops_all_of_them(two_processes, sharding):
    for rank in range(2):
        found = json.loads((two_processes / f"{sharding}-non_finite-{rank}.json").read_text())
        assert found == {"rows": ["rows.jsonl:2"], "unchanged": True}


def test_s01c_ranks_with_unequal_tokens():
    """Rank 0 has 2 tokens of loss 1, rank 1 has 6 of loss 3: the step's loss is 20 / 8."""
    from twinkle_research.metric import CallRecord, LossMetric

    ranks = []
    for loss_sum, count in ((2.0, 2), (18.0, 6)):
        metric = LossMetric()
        metric.accumulate(CallRecord(loss_sum, count, count))
        ranks.append(metric.sums())
    import torch

    state = TrainingState({"w": torch.nn.Parameter(torch.zeros(1))}, Runtime())
    assert state.meters[True].calculate(lambda own: [[(sums, {}), own[1]] for sums in ranks])["loss"] == 2.5
