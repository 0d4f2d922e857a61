"""reward=function: all ways to write one, and what it may do wrong (case S05)."""

import asyncio
import math
import re
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from trajectories import sampled

from twinkle_research.data_format import Trajectory
from twinkle_research.errors import ConfigError, UserError
from twinkle_research.reward import FunctionReward, Reward

ROWS = [sampled(text, row=f"rows.jsonl:{i + 1}", answer=len(text)) for i, text in enumerate(["a", "bb", "ccc"])]


def scores(function: object, per: str = "auto", rows: list[Trajectory] = ROWS, **options: object) -> list[float | None]:
    reward = FunctionReward(function, per, **options)
    try:
        return reward(rows)
    finally:
        reward.close()


# --- what it is given -----------------------------------------------------------------------------------------------


def test_one_sample_at_a_time() -> None:
    assert scores(lambda completion: len(completion)) == [1, 2, 3]
    assert scores(lambda completion, answer: len(completion) == answer) == [1, 1, 1]
    assert scores(lambda prompt, completion: len(prompt) + len(completion)) == [2, 3, 4]
    assert scores(lambda trajectory: trajectory["num_tokens"]) == [0, 0, 0]
    assert scores(lambda completion, **columns: columns["answer"]) == [1, 2, 3]
    assert scores(lambda completion, weight=5: weight) == [5, 5, 5]


def test_a_batch_at_a_time() -> None:
    assert scores(lambda completions: [len(c) for c in completions]) == [1, 2, 3]
    assert scores(lambda completions, answer: [a * 10 for a in answer]) == [10, 20, 30]
    assert scores(lambda prompts, **columns: [p[0]["role"] == "user" for p in prompts]) == [1, 1, 1]
    assert scores(lambda trajectories: np.arange(len(trajectories))) == [0, 1, 2]
    assert scores(lambda completions: torch.tensor([0.5, 1, math.nan])) == [0.5, 1, None]
    assert scores(lambda completions: (1, True, np.float32(2))) == [1, 1, 2]


def test_the_config_says_which_where_names_do_not() -> None:
    assert scores(lambda x: len(x["completion"]), "sample") == [1, 2, 3]
    assert scores(lambda xs, answer: [len(xs)] * len(answer), "batch") == [3, 3, 3]
    with pytest.raises(ConfigError, match="cannot tell whether it judges one sample or a batch.*it has x"):
        FunctionReward(lambda x: 0)
    with pytest.raises(ConfigError, match="cannot tell"):
        FunctionReward(lambda completion, completions: 0)
    with pytest.raises(ConfigError, match="did you mean 'sample'"):
        FunctionReward(lambda completion: 0, "samples")


def test_nothing_to_give_for_a_parameter_is_an_error() -> None:
    with pytest.raises(UserError, match=r"parameter 'anwser': rows.jsonl:1 has no such column; did you mean 'answer'\?"):
        scores(lambda completion, anwser: 0)
    with pytest.raises(UserError, match="parameter 'level': 3 samples, rows.jsonl:1 to rows.jsonl:3 has no such column"):
        scores(lambda completions, level: [0, 0, 0])


def test_no_samples_no_call() -> None:
    assert scores(lambda completions: 1 / 0, rows=[]) == []


# --- what it gives --------------------------------------------------------------------------------------------------


def test_none_and_nan_are_not_scores() -> None:
    assert scores(lambda completion, answer: [None, math.nan, 0][answer - 1]) == [None, None, 0]
    assert scores(lambda completions: [None, np.nan, -0.5]) == [None, None, -0.5]


@pytest.mark.parametrize("result", [[1, 2], [1, 2, 3, 4], (), np.zeros(2)])
def test_a_wrong_count_is_an_error(result: object) -> None:
    with pytest.raises(UserError, match=rf"returned {len(result)} rewards for 3 samples \(3 samples, rows.jsonl:1 to"):
        scores(lambda completions: result)


@pytest.mark.parametrize("result", ["1", [1], {}, math.inf, -math.inf, "good", 1j, object(), np.zeros(1)])
def test_what_is_no_number_is_an_error(result: object) -> None:
    with pytest.raises(UserError, match=re.escape("must return a finite number or None; it returned") + ".*rows.jsonl:2"):
        scores(lambda completion, answer: result if answer == 2 else 0)
    with pytest.raises(UserError, match="must return a finite number or None.*rows.jsonl:3"):
        scores(lambda completions: [0, 0, result])


@pytest.mark.parametrize("result", [1.0, "one, two", None, {"a": 1}])
def test_what_is_no_list_is_an_error(result: object) -> None:
    with pytest.raises(UserError, match="must return a list of 3 numbers"):
        scores(lambda completions: result)


def fails_on_two(completion: str, answer: int) -> float:
    return 1 / (answer - 2)


async def fails_later_on_two(completion: str, answer: int) -> float:
    await asyncio.sleep(0)
    return 1 / (answer - 2)


@pytest.mark.parametrize("function", [fails_on_two, fails_later_on_two])
def test_an_exception_names_function_and_row(function: object) -> None:
    with pytest.raises(UserError, match=f"^{function.__name__} raised ZeroDivisionError: .* for rows.jsonl:2$") as caught:
        scores(function)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_an_exception_in_a_batch_names_its_rows() -> None:
    def fails(completions: list[str]) -> list[float]:
        raise KeyError("x")

    with pytest.raises(UserError, match="fails raised KeyError: 'x' for 3 samples, rows.jsonl:1 to rows.jsonl:3"):
        scores(fails)


# --- async ----------------------------------------------------------------------------------------------------------


def test_async_calls_run_side_by_side() -> None:
    running = []

    async def slow(completion: str) -> int:
        running.append(completion)
        await asyncio.sleep(0.2)
        return len(running)  # all have begun when the first ends

    start = time.perf_counter()
    assert scores(slow, rows=ROWS * 4) == [12] * 12
    assert time.perf_counter() - start < 1.5


def test_async_batch_in_any_thread_and_inside_a_running_loop() -> None:
    async def batch(completions: list[str]) -> list[int]:
        await asyncio.sleep(0)
        return [len(c) for c in completions]

    async def inside() -> list[float | None]:
        return scores(batch)

    assert asyncio.run(inside()) == [1, 2, 3]
    found: list[float | None] = []
    thread = threading.Thread(target=lambda: found.extend(scores(batch)))
    thread.start()
    thread.join()
    assert found == [1, 2, 3]


def test_the_loop_is_the_same_from_call_to_call_and_ends_with_close() -> None:
    loops = []

    async def which(completion: str) -> float:
        loops.append(asyncio.get_running_loop())
        return 0.0

    reward = FunctionReward(which)
    reward(ROWS)
    reward(ROWS)
    assert len(set(map(id, loops))) == 1
    reward.close()
    reward.close()
    assert loops[0].is_closed()
    assert not [thread for thread in threading.enumerate() if thread.name == "reward"]


def test_the_first_error_cancels_the_others() -> None:
    ended = []

    async def judge(completion: str) -> float:
        if completion == "a":
            raise ValueError("no")
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(completion)
        return 0.0

    with pytest.raises(UserError, match="judge raised ValueError: no for rows.jsonl:1"):
        scores(judge)
    deadline = time.monotonic() + 5
    while ended != ["bb", "ccc"] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ended == ["bb", "ccc"]


# --- where it comes from --------------------------------------------------------------------------------------------

SOURCE = """
class Longer:
    def __init__(self, than=1):
        self.than = than

    def __call__(self, completion):
        return len(completion) > self.than

def short(completion):
    return -len(completion)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "judges_of_mine.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("judges_of_mine", "reward_judges_of_mine"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


@pytest.mark.parametrize("path", ["judges_of_mine.{}", "judges_of_mine.py:{}", "{folder}/judges_of_mine.py:{}"])
def test_by_module_or_file(folder: Path, path: str) -> None:
    assert scores(path.format("short", folder=folder)) == [-1, -2, -3]
    assert scores(path.format("Longer", folder=folder)) == [0, 1, 1]
    assert scores(path.format("Longer", folder=folder), args={"than": 2}) == [0, 0, 1]


@pytest.mark.parametrize(
    ("path", "args", "reason"),
    [
        ("judges_of_mine.shrt", {}, "did you mean 'short'"),
        ("judges_of_mine.py:shrt", {}, "did you mean 'short'"),
        ("judges_of_yours.py:short", {}, "there is no file judges_of_yours.py"),
        ("judges_of_yours.short", {}, "no module 'judges_of_yours'"),
        ("judges_of_mine.short", {"than": 1}, "arguments than have no effect"),
        ("judges_of_mine.Longer", {"then": 1}, "does not take these arguments"),
        ("json.decoder", {}, "cannot be called"),
    ],
)
def test_paths_and_arguments_that_lead_nowhere(folder: Path, path: str, args: dict, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        FunctionReward(path, args=args)


def test_a_reward_of_ours_by_its_name() -> None:
    assert scores("GSM8KFormatReward", rows=[sampled("#### 5"), sampled("5")]) == [1, 0]


def test_a_subclass_of_reward_is_closed_and_counts() -> None:
    class Own(Reward):
        closed = False

        def __call__(self, trajectories: list[Trajectory]) -> list[float]:
            return [1.0 for _ in trajectories]

        def take_counts(self) -> dict[str, int]:
            return {"seen": 3}

        def close(self) -> None:
            Own.closed = True

    reward = FunctionReward(Own)
    assert reward(ROWS) == [1, 1, 1] and reward.take_counts() == {"seen": 3}
    reward.close()
    assert Own.closed
