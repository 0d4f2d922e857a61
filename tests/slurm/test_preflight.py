"""The check of the nodes before a run, in a real Slurm: what is wrong is told with the name of the node, and nothing starts."""

from __future__ import annotations

import sys

import pytest
from test_batch_script import Programs

pytestmark = [pytest.mark.long, pytest.mark.timeout(240)]

TWO = ("--nodes=2",)
HANGS = "exec sleep 300"
CANNOT_WRITE = "ulimit -f 1024"  # KiB: less than the test file
NO_INTERFACE = "export GLOO_SOCKET_IFNAME=none7"


@pytest.fixture
def programs(cluster, tmp_path):
    made = Programs(cluster, tmp_path)
    made.environment |= {"PREFLIGHT": "1", "PREFLIGHT_SECONDS": "20", "PREFLIGHT_FREE_GB": "0.1"}
    return made


def trouble_on(programs, node: str, command: str) -> dict[str, str]:
    """The environment of a job the Python of which runs ``command`` first on one node."""
    wrapper = programs.folder / "python"
    wrapper.write_text(f'#!/bin/bash\nif [ "$SLURMD_NODENAME" = {node} ]; then\n  {command}\nfi\nexec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    return {"PYTHON": str(wrapper)}


def test_good_nodes(programs):
    state, _, output = programs.end(programs.submit("print('rank', rank)", options=(*TWO, "--ntasks-per-node=2")))
    assert state == "COMPLETED"
    assert output.index("[preflight] 2 nodes are fine") < output.index("rank 0")
    assert not list((programs.folder / "runs").glob("*/.preflight*"))


def test_gpus_that_nobody_sees(programs):
    """Slurm believes in two GPUs a node, PyTorch sees none."""
    state, restarts, output = programs.end(programs.submit("print('the program ran')", options=(*TWO, "--gpus-per-node=2")))
    assert (state, restarts) == ("FAILED", 0)
    for node in programs.cluster.nodes:
        assert f"[preflight] {node}: PyTorch sees 0 GPUs, Slurm has given 2\n" in output
    assert "2 of 2 nodes failed" in output and "--exclude" not in output and "the program ran" not in output
    assert "the nodes are not fit: nothing was started (PREFLIGHT=0 starts without the check)" in output


@pytest.mark.parametrize(
    "command, told",
    [
        (CANNOT_WRITE, "cannot write to runs/toy-{job}: File too large"),
        (NO_INTERFACE, "alone: all-reduce over gloo: "),
        (HANGS, "no answer within 8 s"),
    ],
    ids=["disk", "network", "hangs"],
)
def test_the_bad_node_is_named(programs, command, told):
    good, bad = programs.cluster.nodes
    environment = trouble_on(programs, bad, command)
    limit = "8" if command == HANGS else "20"
    job = programs.submit("print('the program ran')", options=TWO, PREFLIGHT_SECONDS=limit, **environment)
    state, restarts, output = programs.end(job)
    assert (state, restarts) == ("FAILED", 0)
    assert f"[preflight] {bad}: {told.format(job=job)}" in output and f"[preflight] {good}:" not in output
    assert f"[preflight] to go on without: sbatch --exclude={bad} ...\n" in output and "the program ran" not in output


def test_first_node_does_not_answer(programs):
    """Then there is nobody to collect reports: the others tell."""
    first, second = programs.cluster.nodes
    job = programs.submit("print('the program ran')", options=TWO, PREFLIGHT_SECONDS="4", **trouble_on(programs, first, HANGS))
    state, _, output = programs.end(job)
    assert state == "FAILED" and "the program ran" not in output
    assert f"[preflight] {second}: no answer from {first} at {first}:" in output


def test_task_that_cannot_start(programs):
    """srun names it."""
    bad = programs.cluster.nodes[1]
    state, _, output = programs.end(
        programs.submit("print('the program ran')", options=TWO, **trouble_on(programs, bad, "exit 3"))
    )
    assert state == "FAILED" and "the program ran" not in output
    assert f"srun: error: {bad}: task 1: Exited with exit code 3" in output
