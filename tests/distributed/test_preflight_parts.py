"""Who is to blame when nodes do not work together; tests/slurm has the whole check in a real Slurm."""

from __future__ import annotations

import os
import signal
from itertools import combinations

import pytest
import torch.distributed as dist
from children import fork, wait

from twinkle_research.distributed.env import WorldInfo
from twinkle_research.distributed.nodechecks import check_folder, check_gpus, sample_file
from twinkle_research.distributed.preflight import (
    Limits,
    Preflight,
    clock_offsets,
    culprits,
    join,
    nodes_of_ranks,
    pair_rounds,
    verdict,
)


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 9, 64])
def test_pair_rounds(count):
    """Disjoint within a round, no pair twice, and each node meets somebody."""
    leaders = list(range(0, 8 * count, 8))
    rounds = pair_rounds(leaders)
    assert 1 <= len(rounds) <= 3
    pairs = [pair for pairs in rounds for pair in pairs]
    assert len(pairs) == len(set(pairs)) and all(first < second for first, second in pairs)
    for one in rounds:
        members = [rank for pair in one for rank in pair]
        assert len(members) == len(set(members))
    assert {rank for pair in pairs for rank in pair} == set(leaders)


@pytest.mark.parametrize("count", [3, 4, 7, 16])
def test_one_bad_node_is_found(count):
    for bad in range(count):
        works = {pair: bad not in pair for pairs in pair_rounds(list(range(count))) for pair in pairs}
        assert list(culprits(works)) == [bad]


def test_when_two_do_not_reach_each_other_both_are_named():
    assert culprits({(0, 8): False}) == {0: [8], 8: [0]}
    everyone = {pair: pair != (0, 2) for pair in combinations(range(4), 2)}
    assert culprits(everyone) == {0: [2], 2: [0]}
    assert culprits({(0, 1): True}) == {}


def test_clock_offsets():
    """The least offset of all rounds counts: a rank that leaves a barrier late looks ahead, and is not."""
    assert clock_offsets({0: [100.0, 101.0], 1: [100.0, 101.5], 2: [90.0, 91.0]}) == {0: 0.0, 1: 0.0, 2: -10.0}
    assert clock_offsets({0: [100.0], 1: [107.5]}) == {0: 0.0, 1: 7.5}


def test_nodes_and_verdict():
    assert nodes_of_ranks(["a", "b"], [2, 1]) == ["a", "a", "b"]
    text = verdict({"b": ["PyTorch sees 7 GPUs, Slurm has given 8"]}, ["a", "b", "c"], 1.0)
    assert "[preflight] b: PyTorch sees 7 GPUs, Slurm has given 8\n" in text and text.endswith("sbatch --exclude=b ...")


def test_folder(tmp_path):
    assert check_folder(tmp_path, "n1", free_gb=0.0) == [] and sample_file(tmp_path, "n1").is_file()
    assert check_folder(tmp_path / "missing", "n1", 0.0) == [f"cannot write to {tmp_path}/missing: No such file or directory"]
    (problem,) = check_folder(tmp_path, "n1", free_gb=1e9)
    assert problem.endswith(f"GB are free for {tmp_path}, 1e+09 are wanted")
    assert check_gpus(0, 0, 1) == []


class StopsInTheMiddle(Preflight):
    """Answers for itself and is gone when the others begin to talk to it."""

    def local_problems(self):
        found = super().local_problems()
        self.tell("local", found)
        os.kill(os.getpid(), signal.SIGSTOP)
        return found


def clock_is_ahead(seconds: float) -> type[Preflight]:
    class Ahead(Preflight):
        def clock_samples(self):
            return [sample + seconds for sample in super().clock_samples()]

    return Ahead


def run_three(folder, kinds: list[type[Preflight]], seconds: float) -> tuple[int, list[int]]:
    """Exit code of rank 0 (7: rank 2's node was the only one to blame), and the pids of all."""
    listener = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)

    def rank(number: int) -> None:
        world = WorldInfo("slurm", number, 0, 3, 1, "127.0.0.1", listener.port)
        store = dist.TCPStore("127.0.0.1", listener.port, None, False, wait_for_workers=False)
        limits = Limits(clock_seconds=5.0, seconds=seconds)
        problems = kinds[number](world, ["a", "b", "c"], folder, limits, store).run()
        print(problems)
        os._exit(7 if list(problems) == ["c"] else 0 if not problems else 1)

    pids = [fork(lambda number=number: rank(number)) for number in range(3)]
    code = wait(pids[0])
    return code, pids


@pytest.mark.long
def test_node_that_stops_in_the_middle_is_named(tmp_path):
    code, pids = run_three(tmp_path, [Preflight, Preflight, StopsInTheMiddle], seconds=3.0)
    os.kill(pids[2], signal.SIGKILL)
    assert (code, wait(pids[1])) == (7, 7)
    wait(pids[2])


def test_clock_that_is_wrong_is_named(tmp_path):
    code, pids = run_three(tmp_path, [Preflight, Preflight, clock_is_ahead(9.0)], seconds=30.0)
    assert (code, wait(pids[1]), wait(pids[2])) == (7, 7, 7)


def test_one_process_alone(tmp_path):
    world = WorldInfo("plain")
    limits = Limits(seconds=30.0)
    assert Preflight(world, ["a"], tmp_path, limits, join(world, 5.0)).run() == {}
