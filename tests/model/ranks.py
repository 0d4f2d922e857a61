"""Starts two real processes that talk over gloo; each runs ``main(runtime, *arguments)`` of a module of this folder.

usage: ranks.py MODULE RANK PORT ARGUMENT...
"""

import importlib
import os
import socket
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def launch(module: str, *arguments: object, seconds: float = 250, **variables: str) -> None:
    """Until both have ended; fails with what they wrote to stderr unless both ended well."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])]), "OMP_NUM_THREADS": "1"} | variables
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, module, str(rank), port, *map(str, arguments)], env=env, text=True, stderr=subprocess.PIPE
        )
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=seconds)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(errors)


if __name__ == "__main__":
    import torch

    from twinkle_research.distributed.env import WorldInfo
    from twinkle_research.distributed.runtime import Runtime
    from twinkle_research.model.config import Device
    from twinkle_research.trainer.config import LaunchConfig

    name, rank, port, *words = sys.argv[1:]
    torch.set_num_threads(1)
    world = WorldInfo("torchrun", int(rank), int(rank), 2, 2, "127.0.0.1", int(port))
    own = Runtime.start(LaunchConfig(timeout_minutes=1.0), Device.cpu, world)
    importlib.import_module(name).main(own, *words)
    own.barrier()
    own.close()
