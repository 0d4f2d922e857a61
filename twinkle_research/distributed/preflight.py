"""Checks the nodes of a Slurm job before its ranks start: ``srun python -m twinkle_research.distributed.preflight``.

Each task looks at its node (GPUs, the run folder's file system, sockets) and reports to rank 0; then all of them reduce a
tensor together over gloo, and over NCCL where there are GPUs, and compare clocks. Every wait has a limit, and what fails is
told with the name of its node. The first task's exit code is 1 if a node failed.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from twinkle_research.distributed.env import WorldInfo, detect, tasks_per_node
from twinkle_research.distributed.nodechecks import check_folder, check_gpus, own_gpus, sample_file

POLL_SECONDS = 0.05
VISIBLE_SECONDS = 10.0  # how long a file of another node may take to be seen
LEAVE_SECONDS = 2.0
CLOCK_ROUNDS = 5


@dataclass(frozen=True)
class Limits:
    gpus: int = 0  # that each node should have
    free_gb: float = 0.0
    clock_seconds: float = 5.0
    seconds: float = 180.0  # until each node has answered

    @property
    def reduction(self) -> float:
        """Seconds for one all-reduce of a few numbers, the making of its connections included."""
        return self.seconds / 3


@dataclass
class Preflight:
    """One task. ``nodes``: the node of each rank."""

    world: WorldInfo
    nodes: list[str]
    folder: Path
    limits: Limits
    store: dist.Store
    problems: dict[str, list[str]] = field(default_factory=dict)  # rank 0: by node

    @property
    def leaders(self) -> list[int]:
        """The first rank of each node."""
        return [self.nodes.index(node) for node in dict.fromkeys(self.nodes)]

    # --- on all ranks -------------------------------------------------------------------------------------------

    def run(self) -> dict[str, list[str]]:
        """What is wrong with which node; the same on every rank."""
        self.tell("local", self.local_problems())
        if self.decide(self.judge_local, "all answered"):
            for kind in ("gloo", "nccl") if self.limits.gpus else ("gloo",):
                self.tell(kind, self.reduce(kind, list(range(self.world.world_size))))
                if not self.decide(lambda kind=kind: self.judge_reduction(kind), f"{kind} works"):
                    self.search_pairs(kind)
                    break
            else:
                self.tell("clock", self.clock_samples())
                self.decide(self.judge_clocks, "same time")
        return self.conclude()

    def local_problems(self) -> list[str]:
        problems = check_gpus(self.limits.gpus, self.world.local_rank, self.world.local_world_size)
        if self.world.local_rank == 0:
            problems += check_folder(self.folder, self.nodes[self.world.rank], self.limits.free_gb)
        alone = [self.world.rank]
        kinds = ("gloo", "nccl") if self.limits.gpus and not problems else ("gloo",)
        return problems + [text for kind in kinds if (text := self.reduce(kind, alone, "alone: "))]

    def reduce(self, kind: str, members: list[int], prefix: str = "") -> str:
        """An all-reduce among ``members``, this rank being one of them. Empty when the sum is right, else what happened."""
        store = dist.PrefixStore(f"{prefix}{kind}/{','.join(map(str, members))}", self.store)
        result: list[str] = []

        def work() -> None:
            try:
                result.append(
                    all_reduce(kind, store, members.index(self.world.rank), len(members), self.limits.reduction, self.world)
                )
            except RuntimeError as error:  # of gloo and NCCL: whatever it is, it is told
                result.append(f"{prefix}all-reduce over {kind}: {first_line(error)}")

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(self.limits.reduction)
        return result[0] if result else f"{prefix}all-reduce over {kind} did not end within {self.limits.reduction:.0f} s"

    def search_pairs(self, kind: str) -> None:
        """After a failed all-reduce: pairs of nodes try it, so that the node can be named whose pairs all fail."""
        rank = self.world.rank
        tried: list[tuple[int, int]] = []
        for pairs in pair_rounds(self.leaders):
            for pair in pairs:
                tried.append(pair)
                if rank in pair:
                    self.tell(topic_of(pair), self.reduce(kind, list(pair), "pair: "))
        self.decide(lambda: self.judge_pairs(kind, tried), "pairs")

    def clock_samples(self) -> list[float]:
        """The time on this node at moments that are the same everywhere, but for the delay of the network."""
        group = gloo_group(dist.PrefixStore("clock", self.store), self.world.rank, self.world.world_size, self.limits.reduction)
        samples = []
        for _ in range(CLOCK_ROUNDS):
            group.allreduce([torch.zeros(1)]).wait()
            samples.append(time.time())
        return samples

    # --- talking ------------------------------------------------------------------------------------------------

    def tell(self, topic: str, value: object) -> None:
        self.store.set(f"{topic}/{self.world.rank}", json.dumps(value))

    def collect(self, wanted: Iterable[tuple[str, int]]) -> dict[tuple[str, int], Any]:
        """What ranks told, by (topic, rank); without what has not been told within the limit."""
        end = time.monotonic() + self.limits.seconds
        found: dict[tuple[str, int], Any] = {}
        missing = set(wanted)
        while missing and time.monotonic() < end:
            for topic, rank in [key for key in missing if self.store.check([f"{key[0]}/{key[1]}"])]:
                found[topic, rank] = json.loads(self.store.get(f"{topic}/{rank}"))
                missing.discard((topic, rank))
            time.sleep(POLL_SECONDS)
        return found

    def collect_all(self, topic: str) -> dict[int, Any]:
        """The same for one topic and all ranks, by rank."""
        found = self.collect((topic, rank) for rank in range(self.world.world_size))
        return {rank: found[topic, rank] for rank in range(self.world.world_size) if (topic, rank) in found}

    def decide(self, judge: Callable[[], bool], what: str) -> bool:
        """Rank 0's judgement, on every rank. Before it can judge, others may have up to three pairs to try."""
        if self.world.rank == 0:
            self.store.set(f"decision/{what}", "yes" if judge() else "no")
        self.store.wait([f"decision/{what}"], timedelta(seconds=2 * self.limits.seconds + VISIBLE_SECONDS))
        return self.store.get(f"decision/{what}") == b"yes"

    def conclude(self) -> dict[str, list[str]]:
        if self.world.rank == 0:
            self.store.set("conclusion", json.dumps(self.problems))
        self.store.wait(["conclusion"], timedelta(seconds=self.limits.seconds))
        problems = json.loads(self.store.get("conclusion"))
        self.tell("leaving", True)
        if self.world.rank == 0:  # the store goes with this process
            end = time.monotonic() + LEAVE_SECONDS
            while time.monotonic() < end and not self.store.check([f"leaving/{r}" for r in range(self.world.world_size)]):
                time.sleep(POLL_SECONDS)
        return problems

    # --- on rank 0 ----------------------------------------------------------------------------------------------

    def blame(self, rank: int, text: str) -> None:
        texts = self.problems.setdefault(self.nodes[rank], [])
        if text not in texts:
            texts.append(text)

    def judge_local(self) -> bool:
        told = self.collect_all("local")
        for rank in range(self.world.world_size):
            if rank not in told:
                self.blame(rank, f"no answer within {self.limits.seconds:.0f} s")
            for text in told.get(rank, []):
                self.blame(rank, text)
        end = time.monotonic() + VISIBLE_SECONDS
        waiting = [rank for rank in self.leaders if self.nodes[rank] not in self.problems]
        while waiting and time.monotonic() < end:
            waiting = [rank for rank in waiting if not sample_file(self.folder, self.nodes[rank]).is_file()]
            time.sleep(POLL_SECONDS)
        for rank in waiting:
            self.blame(rank, f"what it wrote to {self.folder} is not seen from {self.nodes[0]}: the run folder is not shared")
        return not self.problems

    def judge_reduction(self, kind: str) -> bool:
        told = self.collect_all(kind)
        return len(told) == self.world.world_size and not any(told.values())

    def judge_pairs(self, kind: str, pairs: list[tuple[int, int]]) -> bool:
        told = self.collect((topic_of(pair), rank) for pair in pairs for rank in pair)
        works = {pair: all(told.get((topic_of(pair), rank)) == "" for rank in pair) for pair in pairs}
        for rank, peers in culprits(works).items():
            names = ", ".join(self.nodes[peer] for peer in peers)
            self.blame(rank, f"all-reduce over {kind} does not work between this node and {names}")
        if not self.problems:
            for rank in self.leaders:
                self.blame(
                    rank, f"all-reduce over {kind} of all {self.world.world_size} ranks failed, though pairs of nodes work"
                )
        return False

    def judge_clocks(self) -> bool:
        for rank, ahead in clock_offsets(self.collect_all("clock")).items():
            if abs(ahead) > self.limits.clock_seconds:
                self.blame(rank, f"its clock is {abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} the others'")
        return not self.problems


# --- parts -----------------------------------------------------------------------------------------------------------


def gloo_group(store: dist.Store, rank: int, size: int, seconds: float) -> dist.ProcessGroupGloo:
    return dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=seconds))


def all_reduce(kind: str, store: dist.Store, rank: int, size: int, seconds: float, world: WorldInfo) -> str:
    """Each rank gives its number; empty when the sum is right."""
    value = torch.full((1024,), float(rank + 1))
    if kind == "nccl":
        value = value.to(f"cuda:{own_gpus(world.local_rank, world.local_world_size)[0]}")
        torch.cuda.set_device(value.device)
        group = dist.ProcessGroupNCCL(store, rank, size)
    else:
        group = gloo_group(store, rank, size, seconds)
    group.allreduce([value]).wait()
    if kind == "nccl":
        torch.cuda.synchronize()
    expected = size * (size + 1) / 2
    return "" if bool((value == expected).all()) else f"all-reduce over {kind} gives {value[0].item()} instead of {expected}"


def topic_of(pair: tuple[int, int]) -> str:
    return f"pair/{pair[0]}-{pair[1]}"


def pair_rounds(leaders: list[int]) -> list[list[tuple[int, int]]]:
    """The first three rounds of a tournament in which, in the end, each node would meet each other one (circle method)."""
    circle: list[int | None] = [*leaders, *([None] if len(leaders) % 2 else [])]
    rounds = []
    for _ in range(min(3, len(circle) - 1)):
        half = len(circle) // 2
        pairs = zip(circle[:half], reversed(circle[half:]), strict=True)
        rounds.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        circle.insert(1, circle.pop())
    return rounds


def culprits(works: dict[tuple[int, int], bool]) -> dict[int, list[int]]:
    """The ranks none of whose pairs work, with these peers: of a failed pair both, unless one of them works with others."""
    peers: dict[int, list[int]] = {}
    for (first, second), ok in works.items():
        if not ok:
            peers.setdefault(first, []).append(second)
            peers.setdefault(second, []).append(first)
    healthy = {rank for pair, ok in works.items() if ok for rank in pair}
    alone = {rank: others for rank, others in peers.items() if rank not in healthy}
    return alone or peers


def clock_offsets(samples: dict[int, list[float]]) -> dict[int, float]:
    """By how many seconds each rank's clock is ahead of the median. The smallest of all rounds: a late one only adds."""
    rounds = list(zip(*samples.values(), strict=True))
    middles = [statistics.median_low(times) for times in rounds]
    return {rank: min((t - m for t, m in zip(times, middles, strict=True)), key=abs) for rank, times in samples.items()}


def nodes_of_ranks(names: list[str], tasks: list[int]) -> list[str]:
    """Tasks are dealt in blocks: all of the first node first."""
    return [name for name, count in zip(names, tasks, strict=True) for _ in range(count)]


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


# --- command ---------------------------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m twinkle_research.distributed.preflight", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--nodes", required=True, help="names of the nodes, separated by commas, in the order of their tasks")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs that each node should have")
    parser.add_argument("--free-gb", type=float, default=0.0, help="free space that the run folder's file system should have")
    parser.add_argument("--clock-seconds", type=float, default=5.0, help="by how much clocks may differ")
    parser.add_argument("--seconds", type=float, default=180.0, help="limit for each part")
    options = parser.parse_args(arguments)
    world = detect()
    names = options.nodes.split(",")
    tasks = tasks_per_node(os.environ["SLURM_STEP_TASKS_PER_NODE"]) if world.joins else [1]
    nodes = nodes_of_ranks(names, tasks)
    began = time.monotonic()
    try:
        store = join(world, options.seconds)
    except dist.DistError as error:
        if world.local_rank == 0:
            where = f"{world.master_addr}:{world.master_port}"
            print(f"[preflight] {nodes[world.rank]}: no answer from {nodes[0]} at {where}: {first_line(error)}", flush=True)
        return 1
    limits = Limits(options.gpus, options.free_gb, options.clock_seconds, options.seconds)
    problems = Preflight(world, nodes, options.run_dir, limits, store).run()
    if world.local_rank == 0:
        sample_file(options.run_dir, nodes[world.rank]).unlink(missing_ok=True)
    if world.rank == 0:
        print(verdict(problems, names, time.monotonic() - began), flush=True)
    return int(bool(problems) and world.rank == 0)


def join(world: WorldInfo, seconds: float) -> dist.Store:
    if world.world_size == 1:
        return dist.HashStore()
    is_first = world.rank == 0
    limit = timedelta(seconds=seconds)
    return dist.TCPStore(world.master_addr, world.master_port, None, is_first, timeout=limit, wait_for_workers=False)


def verdict(problems: dict[str, list[str]], names: list[str], seconds: float) -> str:
    if not problems:
        return f"[preflight] {len(names)} nodes are fine ({seconds:.1f} s)"
    lines = [f"[preflight] {node}: {text}" for node, texts in problems.items() for text in texts]
    lines.append(f"[preflight] {len(problems)} of {len(names)} nodes failed (this was rank 0 on {socket.gethostname()})")
    if len(problems) < len(names):
        lines.append(f"[preflight] to go on without: sbatch --exclude={','.join(problems)} ...")
    return "\n".join(lines)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # a collective that hangs must not keep the process
