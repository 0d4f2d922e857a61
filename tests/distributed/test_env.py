"""Who started this process: recorded environments of a shell, a batch script, srun and torchrun."""

from __future__ import annotations

import os

import pytest

from twinkle_research.distributed.env import (
    WorldInfo,
    detect,
    first_host,
    job_identity,
    let_idle_threads_sleep,
    tasks_per_node,
    usable_cores,
)
from twinkle_research.errors import ConfigError

# Recorded in Slurm 22.05: a job of 2 nodes with 2 tasks each.
BATCH = {
    "SLURM_CLUSTER_NAME": "tw", "SLURM_GTIDS": "0", "SLURM_JOB_ID": "53807", "SLURM_JOB_NODELIST": "127.0.0.[2-3]",
    "SLURM_JOB_NUM_NODES": "2", "SLURM_LOCALID": "0", "SLURM_NNODES": "2", "SLURM_NODEID": "0", "SLURM_NPROCS": "4",
    "SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "2", "SLURM_PROCID": "0", "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_SUBMIT_DIR": "/home", "CUDA_VISIBLE_DEVICES": "0,1",
}  # fmt: skip
STEP = BATCH | {
    "SLURM_GTIDS": "2,3", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_PROCID": "3", "SLURM_STEPID": "0",
    "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "127.0.0.[2-3]", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
}  # fmt: skip
ONE_TASK_STEP = STEP | {
    "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NPROCS": "1", "SLURM_NTASKS": "1", "SLURM_PROCID": "0",
    "SLURM_STEP_ID": "1", "SLURM_STEP_NODELIST": "127.0.0.2", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1",
}  # fmt: skip
TORCHRUN = {
    "RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "sweep-7", "TORCHELASTIC_RESTART_COUNT": "0",
}  # fmt: skip


def test_shell_batch_script_and_one_task_start_their_own_workers():
    for environ in ({}, BATCH, ONE_TASK_STEP, BATCH | {"SLURM_STEP_ID": "4294967291"}):
        world = detect(environ)
        assert (world.kind, world.rank, world.world_size, world.joins) == ("plain", 0, 1, False)


def test_interactive_shell_of_salloc_is_no_step():
    assert detect(STEP | {"SLURM_STEP_ID": "4294967290"}).kind == "plain"


def test_srun_step():
    port = 20000 + 53807 * 7 % 10000
    assert detect(STEP) == WorldInfo("slurm", 3, 1, 4, 2, "127.0.0.2", port, "slurm-53807.0")
    assert detect(STEP).joins
    # Another step of the same job must not meet the first one.
    assert detect(STEP | {"SLURM_STEP_ID": "1"}).master_port == port + 1
    chosen = detect(STEP | {"MASTER_ADDR": "head", "MASTER_PORT": "4000"})
    assert (chosen.master_addr, chosen.master_port) == ("head", 4000)
    uneven = detect(STEP | {"SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_LOCALID": "0"})
    assert uneven.local_world_size == 1


def test_torchrun_also_inside_a_step():
    for outer in ({}, BATCH, STEP):
        assert detect(outer | TORCHRUN) == WorldInfo("torchrun", 3, 1, 4, 2, "node1", 29500, "torchrun-sweep-7")
    assert detect(TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"}).job_key is None


def test_own_worker():
    world = detect(TORCHRUN | {"TWINKLE_RUN_DIR": "runs/x"})
    assert world.kind == "worker" and not world.joins


@pytest.mark.parametrize(
    "environ,name",
    [
        ({"RANK": "0"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "8"}, "LOCAL_RANK"),
        ({k: v for k, v in TORCHRUN.items() if k != "MASTER_PORT"}, "MASTER_PORT"),
        (TORCHRUN | {"RANK": "x"}, "RANK='x'"),
        (TORCHRUN | {"RANK": "4"}, "RANK=4"),
        ({k: v for k, v in STEP.items() if k != "SLURM_LOCALID"}, "SLURM_LOCALID"),
    ],
)
def test_contradictory_environment_is_refused(environ, name):
    with pytest.raises(ConfigError, match=name):
        detect(environ)


@pytest.mark.parametrize(
    "nodelist,host",
    [
        ("tw1", "tw1"),
        ("127.0.0.[2-3]", "127.0.0.2"),
        ("gpu[003-008,012],cpu1", "gpu003"),
        ("a,b[1-2]", "a"),
        ("rack[1-2]n[4-7]", "rack1n4"),
        ("n[07,09]-ib", "n07-ib"),
    ],
)
def test_first_host(nodelist, host):
    assert first_host(nodelist) == host


def test_tasks_per_node():
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    assert tasks_per_node("8") == [8]
    with pytest.raises(ConfigError, match="TASKS_PER_NODE"):
        tasks_per_node("many")


def test_job_identity():
    assert job_identity({}) == {}
    assert job_identity(BATCH) == {"job": "tw:53807", "attempt": "0"}
    assert job_identity(BATCH | {"SLURM_RESTART_COUNT": "2"}) == {"job": "tw:53807", "attempt": "2"}


def test_usable_cores():
    assert usable_cores() >= 1


def test_idle_threads_sleep_unless_the_user_says_otherwise(monkeypatch):
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    let_idle_threads_sleep()
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    let_idle_threads_sleep()
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"
    monkeypatch.delenv("OMP_WAIT_POLICY")
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    let_idle_threads_sleep()
    assert "OMP_WAIT_POLICY" not in os.environ
