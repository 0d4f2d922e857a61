"""Runtime: identity for one process, sums and agreement for two."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_launcher import environment

from twinkle_research.distributed import runtime as runtime_module
from twinkle_research.distributed.env import WorldInfo
from twinkle_research.distributed.runtime import Runtime, choose_device, set_threads
from twinkle_research.distributed.signals import StopSignals
from twinkle_research.errors import ConfigError
from twinkle_research.model.config import Device
from twinkle_research.trainer.config import LaunchConfig

TWO_RANKS = """
import json, sys, torch
from twinkle_research.distributed.env import WorldInfo
from twinkle_research.distributed.runtime import Runtime
from twinkle_research.model.config import Device
from twinkle_research.trainer.config import LaunchConfig
rank, port = int(sys.argv[1]), int(sys.argv[2])
r = Runtime.start(LaunchConfig(), Device.cpu, WorldInfo("torchrun", rank, rank, 2, 2, "127.0.0.1", port))
tensor = torch.tensor([1.0, 2.0]) * (rank + 1)
answer = {
    "same": r.all_reduce_sum(tensor) is tensor, "tensor": tensor.tolist(), "int": r.all_reduce_sum(2**53 + rank),
    "float": r.all_reduce_sum(0.1 * (rank + 1)), "any": [r.any(rank == 1), r.any(False)], "stop": r.stop_requested(),
    "broadcast": r.broadcast_object({"from": rank}), "gather": r.gather_objects({1: rank}) == [{1: 0}, {1: 1}], "main": r.is_main,
}
r.barrier()
r.close()
print(json.dumps(answer))
"""


def test_one_process_is_the_identity():
    runtime = Runtime.start(LaunchConfig(), Device.cpu)
    tensor = torch.ones(2)
    assert runtime.all_reduce_sum(tensor) is tensor
    assert (runtime.all_reduce_sum(3), runtime.any(True), runtime.any(False), runtime.is_main) == (3, True, False, True)
    assert runtime.broadcast_object("x") == "x" and runtime.gather_objects("x") == ["x"]
    assert runtime.stop_requested() is False
    stop = StopSignals()
    runtime.stop = stop
    stop.count = 1
    assert runtime.stop_requested() is True
    runtime.barrier()
    runtime.close()


def test_two_ranks(free_port):
    ranks = [
        subprocess.Popen([sys.executable, "-c", TWO_RANKS, str(r), str(free_port)], stdout=subprocess.PIPE, env=environment())
        for r in range(2)
    ]
    answers = [json.loads(process.communicate(timeout=60)[0]) for process in ranks]
    assert [answer.pop("main") for answer in answers] == [True, False]
    assert answers[0] == answers[1]
    assert answers[0].pop("float") == pytest.approx(0.3, abs=1e-15)
    assert answers[0] == {
        "same": True, "tensor": [3.0, 6.0], "int": 2**54 + 1, "any": [True, False], "stop": False,
        "broadcast": {"from": 0}, "gather": True,
    }  # fmt: skip


@pytest.fixture
def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_device(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert choose_device(Device.auto, WorldInfo("plain")).type == "cpu"
    with pytest.raises(ConfigError, match="backend.device=cuda"):
        choose_device(Device.cuda, WorldInfo("plain"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device(Device.cpu, WorldInfo("plain")).type == "cpu"
    assert choose_device(Device.auto, WorldInfo("torchrun", 3, 1, 4, 2)) == torch.device("cuda", 1)
    with pytest.raises(ConfigError, match="launch.nproc_per_node=3 .* 2 are visible"):
        choose_device(Device.auto, WorldInfo("worker", 2, 2, 3, 3))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert choose_device(Device.auto, WorldInfo("slurm", 3, 1, 4, 2)) == torch.device("cuda", 0)
    assert chosen == [1, 0]


def test_threads(monkeypatch):
    asked = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.setattr(runtime_module, "usable_cores", lambda: 9)
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    set_threads(None, cpu, 2)  # OMP_NUM_THREADS is set in tests
    monkeypatch.delenv("OMP_NUM_THREADS")
    set_threads(None, cuda, 2)
    assert asked == []
    set_threads(None, cpu, 2)
    set_threads(None, cpu, 20)
    set_threads(3, cuda, 2)
    assert asked == [4, 1, 3]


def test_importing_the_launcher_imports_no_torch():
    code = "import sys, twinkle_research.distributed.launcher; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=environment(), cwd=Path(__file__).parent).returncode == 0
