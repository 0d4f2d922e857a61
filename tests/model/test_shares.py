"""Where several processes work on one share of the data together, nothing is counted twice and all get the results."""

import json

import pytest
import shares_worker
from ranks import launch

from twinkle_research.model.transformers import TransformersModel


@pytest.mark.timeout(300)
def test_two_processes_on_one_share_are_as_one(tiny_llama, tmp_path):
    launch("shares_worker", tiny_llama, tmp_path)
    alone = shares_worker.measured(TransformersModel(tiny_llama, seed=4))
    assert alone["tokens"] == pytest.approx(sum(row["length"] for row in shares_worker.ROWS))
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found.pop("tokens") == pytest.approx(alone["tokens"])
        assert found == {name: value for name, value in json.loads(json.dumps(alone)).items() if name != "tokens"}
