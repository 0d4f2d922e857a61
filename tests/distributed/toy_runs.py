"""Runs that do no training, for the tests of the launcher: ``python toy_runs.py <entry> <override>...``"""

from __future__ import annotations

import atexit
import faulthandler
import json
import os
import signal
import sys
import time

from twinkle_research.errors import DataError, Stopped


def count(cfg, runtime, folder, pause=0.0):
    """Steps up to ``trainer.max_steps``, each with a collective; continues from the last row of metrics.jsonl."""
    step = runtime.broadcast_object(folder.last_step())
    if runtime.is_main:
        print(f"from step {step} with {runtime.world_size} ranks in {folder}")
    last = min(cfg.trainer.max_steps, step + int(os.environ.get("TOY_STEPS", "1000000")))
    while step < last:
        step += 1
        total = runtime.all_reduce_sum(1.0)
        if runtime.is_main:
            with folder.metrics.open("a") as file:
                file.write(json.dumps({"step": step, "loss": 1 / step, "ranks": total}) + "\n")
        if runtime.stop_requested() and step < cfg.trainer.max_steps:
            raise Stopped(f"stopped at step {step} of {cfg.trainer.max_steps}")
        time.sleep(pause)
    if cfg.eval_only and runtime.is_main:
        folder.write_json("evaluation.json", {"step": step})
    return {"step": step, "objective": 0.5}


def slow(cfg, runtime, folder):
    return count(cfg, runtime, folder, pause=0.05)


def signal_last_rank(cfg, runtime, folder):
    """The scheduler signals one rank only; all must stop at the same step."""
    if runtime.rank == runtime.world_size - 1:
        os.kill(os.getpid(), signal.SIGUSR1)
    return slow(cfg, runtime, folder)


def fail_on_last_rank(cfg, runtime, folder):
    if runtime.rank == runtime.world_size - 1:
        time.sleep(0.3)
        raise ValueError("the flux capacitor of this rank is empty")
    return count(cfg, runtime, folder)


def fail_beside_a_busy_rank(cfg, runtime, folder):
    if runtime.rank == 1:
        raise ValueError("the flux capacitor of this rank is empty")
    time.sleep(60)


def fail_and_linger(cfg, runtime, folder):
    """The failing rank closes its connections and takes its time to go: its peers fail and leave before it."""
    if runtime.rank == 0:
        return count(cfg, runtime, folder, pause=0.01)
    runtime.broadcast_object(None)
    for _ in range(20):
        runtime.all_reduce_sum(1.0)
        runtime.stop_requested()
    atexit.register(time.sleep, 2)
    raise ValueError("the flux capacitor of this rank is empty")


def fail_once(cfg, runtime, folder):
    """Fails in its first attempt, after three steps."""
    if not folder.last_step():
        cfg.trainer.max_steps = 3
        count(cfg, runtime, folder)
        runtime.barrier()
        if runtime.rank == 1:
            raise ValueError("only the first time")
    return count(cfg, runtime, folder)


def bad_data(cfg, runtime, folder):
    raise DataError("rows.jsonl:7: 'messages' is missing; give messages or prompt and completion")


def die(cfg, runtime, folder):
    if runtime.rank == runtime.world_size - 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    return count(cfg, runtime, folder)


def crash(cfg, runtime, folder):
    if runtime.rank == runtime.world_size - 1:
        time.sleep(0.3)
        faulthandler._sigsegv()
    return count(cfg, runtime, folder)


def vanish(cfg, runtime, folder):
    os._exit(7)


def long_operation(cfg, runtime, folder):
    """One call into torch that lasts for minutes."""
    import torch

    matrix = torch.ones(5000, 5000, dtype=torch.float64).triu()
    print("in the long operation", flush=True)
    torch.linalg.svd(matrix)


def main(arguments: list[str]) -> int:
    from twinkle_research.config.composing import compose
    from twinkle_research.config.plan import run_plan
    from twinkle_research.config.storage import to_object
    from twinkle_research.distributed.launcher import start

    entry, *overrides = arguments
    in_process = "--child" not in overrides
    cfg = to_object(compose(["model=tiny", *(o for o in overrides if o != "--child")]))
    return start(cfg, run_plan(cfg), in_process=in_process, entry=f"toy_runs:{entry}")


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    if any(word.startswith("launch.nproc_per_node") for word in sys.argv):
        assert "torch" not in sys.modules, "a process that only starts others must stay light"
    sys.exit(exit_code)
