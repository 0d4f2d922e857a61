"""The projection's rows on 2 and 4 real gloo processes against all of them on one. They are started once for all cases."""

import json

import head_shards_worker as worker
import pytest
import torch
from ranks import launch

from twinkle_research.model.head import score_labels
from twinkle_research.model.vocabulary import ShardedVocabulary

pytestmark = pytest.mark.timeout(300)

TOLERANCES = {"float64": 1e-12, "float32": 1e-6, "bfloat16": 2e-2}


@pytest.fixture(scope="module")
def four_processes(once):
    return once("head_sharded", lambda folder: launch("head_shards_worker", folder, processes=4))


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize(("rows", "dtype"), worker.RUNS, ids=str)
def test_shards_score_like_the_whole(four_processes, rows, dtype, rank):
    found = json.loads((four_processes / f"{rank}.json").read_text())[f"{rows} {dtype}"]
    assert found.keys() == {*worker.OUTPUTS, "hidden", "weight", "bias"}
    assert max(found.values()) <= TOLERANCES[dtype], found


def test_padded_rows_are_refused():
    """They would take part in the softmax. The last of four ranks has 64 rows of 256, 6 of them padding."""
    hidden, weight = torch.zeros(3, 6), torch.zeros(64, 6)
    with pytest.raises(ValueError, match="rows 192 to 255 of a vocabulary of 250: cut the padding off"):
        score_labels(hidden, weight, torch.zeros(3, dtype=torch.int64), vocabulary=ShardedVocabulary(192, 250))
