"""torchrun's options in a Slurm step; tests/slurm runs it."""

from __future__ import annotations

import pytest

from twinkle_research.distributed.agent import rendezvous
from twinkle_research.errors import ConfigError

STEP = {
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "3",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NODELIST": "gpu[3-6]",
}


def test_rendezvous(monkeypatch):
    """Static: the first node of the step keeps rank 0. Another step of the job has another port."""
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    assert rendezvous(8) == [
        "--nnodes=4", "--node-rank=2", "--nproc-per-node=8", "--max-restarts=0", "--master-addr=gpu3", "--master-port=20087",
        "--rdzv-id=12.3",
    ]  # fmt: skip
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert rendezvous(8)[4:6] == ["--master-addr=10.0.0.1", "--master-port=29500"]


def test_outside_of_a_step(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(ConfigError, match="SLURM_JOB_ID is not set: the agent runs in an srun step, one task a node"):
        rendezvous(8)
