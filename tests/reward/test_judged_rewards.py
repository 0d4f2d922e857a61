"""Rewards that processes give: what hangs or crashes there costs one score, never the run."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator

import pytest
from trajectories import sampled

from twinkle_research.errors import DataError, UserError
from twinkle_research.reward import MathReward, ReasoningGymReward
from twinkle_research.reward.judge import is_plain_expression
from twinkle_research.reward.workers import WorkerPool

HANGS = r"It is \boxed{9^{9^{9^{9}}}}."
CODE = "__import__('os').system('touch {}')"


@pytest.fixture(scope="module")
def math() -> Iterator[MathReward]:
    reward = MathReward("answer", timeout=2.0)
    yield reward
    reward.close()


@pytest.fixture(scope="module")
def gym() -> Iterator[ReasoningGymReward]:
    reward = ReasoningGymReward()
    yield reward
    reward.close()


def processes(reward: MathReward) -> list[int]:
    return [worker.process.pid for worker in reward._pool._workers]


# --- mathematics ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("completion", "answer", "right"),
    [
        (r"so \boxed{\frac{1}{2}}", "0.5", 1),
        (r"so \boxed{0.5}", r"\frac12", 1),
        (r"\boxed{x^2+2x+1}", "(x+1)^2", 1),
        (r"first \boxed{3}, but no: \boxed{4}", "4", 1),
        ("The answer is $4$.", "We get 2+2, so \\boxed{4}.", 1),
        ("the answer is 72", "#### 72", 1),
        (r"\boxed{73}", "72", 0),
        (r"\boxed{\text{B}}", r"\text{B}", 1),
        (r"\boxed{(1, 2)}", "(1,2)", 1),
        (r"\boxed{(2, 1)}", "(1,2)", 0),
        ("no idea", "72", 0),
        ("", "72", 0),
    ],
)
def test_math(math: MathReward, completion: str, answer: str, right: int) -> None:
    assert math([sampled(completion, answer=answer)]) == [right]


def test_an_expression_that_hangs_is_not_scored_and_the_next_ones_are(math: MathReward) -> None:
    before = processes(math)
    math.take_counts()
    start = time.perf_counter()
    scores = math([sampled(text, answer="5") for text in (r"\boxed{5}", HANGS, r"\boxed{5}", r"\boxed{6}")])
    assert scores == [1, None, 1, 0]
    assert math.take_counts() == {"timeouts": 1} and math.take_counts() == {}
    assert time.perf_counter() - start < 60
    assert processes(math) != before
    with pytest.raises(ProcessLookupError):
        os.kill(before[0], 0)


def test_works_outside_the_main_thread(math: MathReward) -> None:
    """Where alarms cannot be set, scores used to become 0 silently (verl 5635) or nothing ended a hanging one (verl 5839)."""
    found: list[float | None] = []
    texts = (r"\boxed{5}", HANGS, r"\boxed{4}")
    thread = threading.Thread(target=lambda: found.extend(math([sampled(text, answer="5") for text in texts])))
    thread.start()
    thread.join(60)
    assert found == [1, None, 0]


def test_a_process_that_dies_costs_no_score_that_it_did_not_have(math: MathReward) -> None:
    """Killed while it is idle it is replaced; killed at work, its item is not scored and counted."""
    os.kill(processes(math)[0], signal.SIGKILL)
    time.sleep(0.1)
    math.take_counts()
    assert math([sampled(r"\boxed{5}", answer="5")]) == [1] and math.take_counts() == {}
    victim = processes(math)[0]
    threading.Timer(0.3, os.kill, (victim, signal.SIGKILL)).start()
    assert math([sampled(text, answer="5") for text in (HANGS, r"\boxed{5}")]) == [None, 1]
    assert math.take_counts() == {"crashes": 1}


def test_an_answer_that_is_no_mathematics_is_not_scored(math: MathReward) -> None:
    math.take_counts()
    assert math([sampled(r"\boxed{5}", answer="")]) == [None]
    assert math.take_counts() == {"unreadable_answers": 1}
    with pytest.raises(DataError, match="rows.jsonl:9: reward=math needs a column 'answer'"):
        math([sampled("5", row="rows.jsonl:9")])


def test_math_runs_no_code(math: MathReward, tmp_path) -> None:
    marks = [CODE.format(tmp_path / "M"), rf"\boxed{{{CODE.format(tmp_path / 'M')}}}", f"${CODE.format(tmp_path / 'M')}$"]
    assert all(score in (0, None) for score in math([sampled(text, answer="5") for text in marks]))
    assert not (tmp_path / "M").exists()


def test_several_processes_keep_the_order() -> None:
    reward = MathReward("answer", workers=2, timeout=3.0)
    try:
        right = [i % 3 == 0 for i in range(12)]
        scores = reward([sampled(rf"\boxed{{{i if ok else i + 1}}}", answer=str(i)) for i, ok in enumerate(right)])
        assert scores == [float(ok) for ok in right]
        assert len(set(processes(reward))) == 2
    finally:
        reward.close()
    for pid in processes(reward):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    reward.close()


def test_no_process_outlives_the_run(tmp_path) -> None:
    """Not even where the run is killed while an expression hangs: the process then ends itself."""
    program = tmp_path / "run.py"
    program.write_text(
        textwrap.dedent(
            f"""
            import threading, time
            from twinkle_research.reward.workers import WorkerPool
            pool = WorkerPool("math", 2, 1.0)
            print(*[worker.process.pid for worker in pool._workers], flush=True)
            item = {{"completion": {HANGS!r}, "answer": "5"}}
            pool._workers[0].timeout = 1000.0
            threading.Thread(target=pool._workers[0].judge, args=(item,), daemon=True).start()
            while not pool._workers[0].ready:
                time.sleep(0.05)
            print("busy", flush=True)
            time.sleep(1000)
            """
        )
    )
    run = subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, text=True)
    pids = list(map(int, run.stdout.readline().split()))
    assert run.stdout.readline() == "busy\n"
    time.sleep(0.3)
    run.kill()
    run.wait()
    run.stdout.close()
    deadline = time.monotonic() + 30
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, "a judging process is still there"
        time.sleep(0.1)


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_judge_that_cannot_start_says_why() -> None:
    pool = WorkerPool("maths")
    with pytest.raises(UserError, match=r"reward=maths: the process that judges ended at its start: KeyError: 'maths'"):
        pool.judge([{}])
    pool.close()


# --- reasoning-gym --------------------------------------------------------------------------------------------------


def entry(dataset: str, index: int = 0, **options: object) -> dict:
    return {"dataset": dataset, "seed": 0, "options": options, "index": index}


def test_reasoning_gym_judges_by_its_own_rules(gym: ReasoningGymReward) -> None:
    """Of all numbers that two digits can add up to, one is right; tags, and space around the answer, do not matter."""
    which = entry("chain_sum", min_terms=2, max_terms=2, min_digits=1, max_digits=1)
    scores = gym([sampled(str(n), reasoning_gym=which) for n in range(-9, 19)])
    assert sum(score == 1.0 for score in scores) == 1
    right = str(range(-9, 19)[scores.index(1.0)])
    texts = [f"Well.\n<answer> {right} </answer>", f" {right}\n", "nothing", ""]
    assert gym([sampled(text, reasoning_gym=which) for text in texts])[:2] == [1, 1]


@pytest.mark.parametrize("dataset", ["string_insertion", "spiral_matrix", "binary_matrix", "n_queens", "puzzle24", "countdown"])
def test_reasoning_gym_runs_no_answer(gym: ReasoningGymReward, dataset: str, tmp_path) -> None:
    """The package hands answers to these tasks to eval (case S35)."""
    code = CODE.format(tmp_path / "M")
    for text in (code, f"[{code}]", f"1 + {code}", "().__class__.__bases__", "[].__class__"):
        assert gym([sampled(text, reasoning_gym=entry(dataset))])[0] in (0, 0.01, 0.05, None)
    assert not (tmp_path / "M").exists()


@pytest.mark.parametrize("text", ["(1 + 2) * 3 / 4", "-2*x**9 + 7*X**8 + C", "exp(x)*sin(x) - 3.5", "2**(1/2)", "1 .5"])
def test_plain_expressions(text: str) -> None:
    assert is_plain_expression(text)


@pytest.mark.parametrize(
    "text", ["x.real", "(1).real", "1 . real", "__import__", "os", "f'x'", "[1]", "x == 1", "eval(x)", "1;2"]
)
def test_other_expressions(text: str) -> None:
    assert not is_plain_expression(text)
