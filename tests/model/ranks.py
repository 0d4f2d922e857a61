"""Starts real processes that talk over gloo; each runs ``main(runtime, *arguments)`` of a module of this folder
or of megatron/ in it.

usage: ranks.py MODULE RANK PROCESSES PORT ARGUMENT...    RANK "all": those processes as children of this one
"""

import contextlib
import gc
import importlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def launch(
    module: str, *arguments: object, processes: int = 2, seconds: float = 250, forked: bool = True, **variables: str
) -> None:
    """Until all have ended; fails with what they wrote to stderr unless all ended well.

    ``forked``: the module is imported once, before the processes part. Importing Megatron-Core takes longer than most tests.
    Not for what starts threads when it is imported.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    env = (
        os.environ
        | {"PYTHONPATH": os.pathsep.join(map(str, (HERE, HERE / "megatron", HERE.parents[1]))), "OMP_NUM_THREADS": "1"}
        | variables
    )
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, module, str(rank), str(processes), port, *map(str, arguments)],
            env=env,
            text=True,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        for rank in (["all"] if forked else range(processes))
    ]
    try:
        errors = [process.communicate(timeout=seconds)[1] for process in ranks]
    finally:
        for process in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert not any(process.returncode for process in ranks), "\n".join(errors)


def fork(processes: int) -> int:
    """The rank, in each child. The parent ends when all have ended; when the first has failed, with all of them."""
    children = set()
    for rank in range(processes):
        child = os.fork()
        if child == 0:
            return rank
        children.add(child)
    while children:
        child, status = os.wait()
        children.discard(child)
        if status:
            os.killpg(0, signal.SIGKILL)  # the others may wait for this one
    os._exit(0)


if __name__ == "__main__":
    import torch

    from twinkle_research.distributed.env import WorldInfo
    from twinkle_research.distributed.runtime import Runtime
    from twinkle_research.model.config import Device
    from twinkle_research.trainer.config import LaunchConfig

    name, rank, processes, port, *words = sys.argv[1:]
    torch.set_num_threads(1)
    main = importlib.import_module(name).main
    gc.freeze()  # closing a model looks for circles of garbage: not among all that was imported
    place = fork(int(processes)) if rank == "all" else int(rank)
    world = WorldInfo("torchrun", place, place, int(processes), int(processes), "127.0.0.1", int(port))
    own = Runtime.start(LaunchConfig(timeout_minutes=1.0), Device.cpu, world)
    main(own, *words)
    own.barrier()
    own.close()
