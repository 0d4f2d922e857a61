"""Sweeps whose jobs cost nothing: ``python sweep_toys.py train|sweep <words>...``.

A job's objective is a bowl over two settings with its lowest point at optimizer.lr=0.01 and adapter.r=20. adapter.r=7 fails
(except with that learning rate) and seed=75 is stopped, until there is a file "go".
Composing, launching, recording, the run folders and Slurm are the real ones.
"""

from __future__ import annotations

import functools
import json
import math
import os
import subprocess
import sys
import time

HERE = os.path.abspath(__file__)
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(HERE)))


def start(what, *words, cwd, **environment):
    """``train`` or ``sweep`` in a process of its own."""
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([ROOT, os.path.dirname(HERE)])} | environment
    return subprocess.Popen(
        [sys.executable, HERE, what, *words], cwd=cwd, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def bowl_of(cfg):
    return (math.log10(cfg.optimizer.lr) + 2) ** 2 + ((cfg.adapter.r - 20) / 10) ** 2


def is_cracked(cfg):
    return cfg.adapter.r == 7 and cfg.optimizer.lr != 0.01 and not os.path.exists("go")


def bowl(cfg, runtime, folder):
    """An entry for real ranks: steps with a collective each, continued where an earlier attempt was stopped."""
    from twinkle_research.errors import Stopped

    if is_cracked(cfg):
        raise ValueError("the bowl is cracked at 7")
    step = runtime.broadcast_object(folder.last_step())
    nodes = runtime.gather_objects(os.environ.get("SLURMD_NODENAME"))
    while step < cfg.trainer.max_steps:
        step += 1
        ranks = runtime.all_reduce_sum(1.0)
        if runtime.is_main:
            with folder.metrics.open("a") as file:
                row = {"step": step, "loss": bowl_of(cfg) + 1 / step, "ranks": ranks, "nodes": nodes}
                file.write(json.dumps(row) + "\n")
        if runtime.stop_requested() and step < cfg.trainer.max_steps:
            raise Stopped(f"stopped at step {step} of {cfg.trainer.max_steps}")
        time.sleep(float(os.environ.get("TOY_PAUSE", "0")))
    return {"step": step, "objective": bowl_of(cfg)}


def quick(cfg, plan, in_process=True):
    """In the place of ``launcher.start``: the run folder of a bowl without a process."""
    from twinkle_research.trainer.rundir import RunFolder, open_run

    folder = RunFolder(cfg.run_dir)
    if not open_run(folder, cfg):
        return 0
    time.sleep(float(os.environ.get("TOY_PAUSE", "0")))
    if cfg.seed == 75 and not os.path.exists("go"):
        folder.write_status("stopped", message="stopped at step 0 of 1")
    elif is_cracked(cfg):
        folder.write_status("failed", message="the bowl is cracked at 7", traceback="Traceback ...")
    else:
        folder.metrics.write_text('{"step": 1, "loss": 1.0}\n')
        folder.write_status("finished", step=1, objective=bowl_of(cfg))
    folder.lock.release()
    return {"finished": 0, "stopped": 75}.get(folder.read_status()["state"], 1)


def main(what, words):
    from twinkle_research.config import cli
    from twinkle_research.distributed import launcher
    from twinkle_research.sweep import batch, command, job, local

    def toy_command(folder, *options):
        return [sys.executable, HERE, "job", str(folder), *options]

    batch.job_command = local.job_command = toy_command
    in_ranks = what == "job" or os.environ.get("TOY_RANKS")
    launcher.start = functools.partial(launcher.start, entry="sweep_toys:bowl") if in_ranks else quick
    return {"train": cli.main, "sweep": command.main, "job": job.main}[what](words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
