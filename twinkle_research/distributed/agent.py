"""One torchrun agent on each node of a Slurm job: ``srun --ntasks-per-node=1 python -m twinkle_research.distributed.agent``.

Static rendezvous, so that the job's first node has rank 0. SIGUSR1 is blocked here and in the workers until they listen:
``scancel --signal`` and ``kill -USR1 <srun>`` reach every process of a step, and torchrun would die of it.
"""

from __future__ import annotations

import argparse
import os
import signal

from twinkle_research.distributed.env import first_host, port_of_step
from twinkle_research.errors import ConfigError


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m twinkle_research.distributed.agent", description=__doc__)
    parser.add_argument("--nproc", type=int, required=True, help="ranks on this node")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- train.py and its settings")
    options = parser.parse_args(arguments)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})

    from torch.distributed.run import main as torchrun

    torchrun([*rendezvous(options.nproc), *options.command[options.command[:1] == ["--"] :]])


def rendezvous(nproc: int) -> list[str]:
    """torchrun's options for this node, from the variables of the srun step."""
    try:
        job, step = int(os.environ["SLURM_JOB_ID"]), int(os.environ["SLURM_STEP_ID"])
        nodes, node = os.environ["SLURM_STEP_NUM_NODES"], os.environ["SLURM_NODEID"]
        first = first_host(os.environ["SLURM_STEP_NODELIST"])
    except KeyError as error:
        raise ConfigError(f"{error.args[0]} is not set: the agent runs in an srun step, one task a node") from None
    port = os.environ.get("MASTER_PORT") or str(port_of_step(job, step))
    return [
        f"--nnodes={nodes}", f"--node-rank={node}", f"--nproc-per-node={nproc}", "--max-restarts=0",
        f"--master-addr={os.environ.get('MASTER_ADDR') or first}", f"--master-port={port}", f"--rdzv-id={job}.{step}",
    ]  # fmt: skip


if __name__ == "__main__":
    main()
