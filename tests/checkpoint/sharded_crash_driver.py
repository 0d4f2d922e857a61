"""Run as a script by test_checkpoint_crash.py: kills one of two processes at every point at which it touches the disk, while
both save with checkpoint.format=sharded.

    python sharded_crash_driver.py <folder> <background: 0 or 1>

Prints one JSON object: for each of the two processes how many points there were, which save was found after each, and what went
wrong.
"""

import json
import logging
import os
import shutil
import signal
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from crash_driver import Disk

from twinkle_research.checkpoint.config import CheckpointConfig, CheckpointFormat
from twinkle_research.checkpoint.format import CheckpointReader, TensorSpec
from twinkle_research.checkpoint.manager import CheckpointManager
from twinkle_research.checkpoint.parts import PartedTensor
from twinkle_research.distributed.runtime import Runtime
from twinkle_research.trainer.rundir import RunFolder

SECONDS = 30  # until the other process must have ended
BOXES = {0: ((0, 3), (0, 4)), 1: ((3, 8), (0, 4))}


class Weights:
    """What a save needs of a model: its own rows of tensors that tell which save wrote them."""

    backend = "megatron"
    layout = {"world_size": 2}

    def __init__(self, value: float, runtime: Runtime) -> None:
        self.value, self.runtime = value, runtime

    def save_state(self, writer):
        ranks = BOXES if self.runtime.world_size == 2 else {0: ((0, 8), (0, 4))}
        for folder, suffix in (("model", ""), ("optimizer", ".exp_avg")):
            specs = [TensorSpec(f"layer.{i}{suffix}", "float32", (8, 4)) for i in range(2)]
            (top, bottom), _ = ranks[self.runtime.rank]
            own = [(spec.name, torch.full((bottom - top, 4), self.value + i)) for i, spec in enumerate(specs)]
            writer.add_parts(folder, folder, [PartedTensor(spec, ranks) for spec in specs], own)
        return {"value": self.value}


def save(run: Path, step: int, value: float, runtime: Runtime, background: bool = False) -> None:
    settings = CheckpointConfig(keep=1, keep_best=False, background=background, format=CheckpointFormat.sharded)
    manager = CheckpointManager(RunFolder(run), settings, runtime)
    manager.save(step, Weights(value, runtime), {"step": step})
    manager.wait()


def content(path: Path) -> float:
    """The value that was saved, checked to be the same in every part."""
    reader = CheckpointReader(path)
    reader.verify("full")
    value = reader.json("trainer_state.json")["model"]["value"]
    for folder, suffix in (("model", ""), ("optimizer", ".exp_avg")):
        tensors = reader.tensors(folder)
        assert all(torch.equal(tensors[f"layer.{i}{suffix}"], torch.full((8, 4), value + i)) for i in range(2)), path
    return value


def saved_by_two(run: Path, victim: int, fatal: int, background: bool) -> bool:
    """Whether ``victim`` was killed at its ``fatal``-th point; else the save went through."""
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            child_saves(run, rank, victim, fatal, background)
        children.append(child)
    statuses = [wait(child) for child in children]
    assert not any(os.WIFSIGNALED(s) and os.WTERMSIG(s) == signal.SIGALRM for s in statuses), "a process waits for ever"
    if os.WIFSIGNALED(statuses[victim]):
        return True
    assert statuses == [0, 0], f"the save failed by itself at point {fatal} of process {victim}"
    return False


def child_saves(run: Path, rank: int, victim: int, fatal: int, background: bool) -> None:
    signal.alarm(SECONDS)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the other process complains about the one that dies
    code = 1
    try:
        store = dist.FileStore(str(run.parent / f"{run.name}.store"), 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=SECONDS))
        runtime = Runtime(rank, 2, rank, host_group=dist.group.WORLD)
        if rank == victim:
            Disk(run, fatal, power_loss=False).install()
        save(run, 4, 300.0, runtime, background)
        code = 0
    finally:
        os._exit(code)


def wait(child: int) -> int:
    return os.waitpid(child, 0)[1]


def check(run: Path) -> str:
    """After the crash the old or the new checkpoint is whole, and the next save goes through and leaves nothing over."""
    manager = CheckpointManager(RunFolder(run), CheckpointConfig(), Runtime())
    newest = manager.latest()
    found = None if newest is None else content(newest)
    assert found in (100.0, 300.0), f"latest() has {found}"
    named = (run / "checkpoints" / "latest").read_text().strip()
    folder = run / "checkpoints" / named
    assert not folder.exists() or content(folder) in (100.0, 300.0), named
    save(run, 4, 400.0, Runtime())
    assert content(manager.latest()) == 400.0
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert names == ["latest", "step-000004"], names
    return "old" if found == 100.0 else "new"


def crash_everywhere(base: Path, victim: int, background: bool) -> dict:
    failures, outcomes = [], []
    template = base / "template"
    template.mkdir(parents=True)
    save(template, 2, 100.0, Runtime())
    point, killed = 0, True
    while killed:
        point += 1
        run = base / f"run-{point}"
        shutil.copytree(template, run)
        killed = saved_by_two(run, victim, point, background)
        if killed:
            try:
                outcomes.append(check(run))
            except Exception as error:
                failures.append(f"point {point}: {type(error).__name__}: {error}")
        shutil.rmtree(run)
    return {"points": point - 1, "failures": failures, "outcomes": outcomes}


def main() -> None:
    base, background = Path(sys.argv[1]).resolve(), sys.argv[2] == "1"
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    os.fsync = lambda descriptor: None  # waiting for the real disk shows nothing
    print(json.dumps([crash_everywhere(base / str(victim), victim, background) for victim in range(2)]))


main()
