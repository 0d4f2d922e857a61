"""Engines on two ranks beside a sharded trainer: each its own, and one for both."""

import json
import os
import sys
from pathlib import Path

import pytest
from engines import needs_vllm

pytestmark = [needs_vllm, pytest.mark.long]
HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "model"))


def test_two_ranks_sample_what_one_process_samples(tmp_path):
    from ranks import launch

    launch("vllm_worker", tmp_path, forked=False, PYTHONPATH=os.pathsep.join(map(str, (HERE, HERE.parents[1]))))
    assert json.loads((tmp_path / "results.json").read_text()) == {"1": True, "2": True}
