"""Tasks whose questions are made here: right answers, exact bounds, and no question on both sides of the split."""

import hashlib
import os
import re
import subprocess
import sys
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from twinkle_research.config import compose, to_object
from twinkle_research.dataset.config import (
    CountdownDataConfig,
    GeneratedDataConfig,
    Operation,
    ReasoningGymDataConfig,
    SumsDataConfig,
)
from twinkle_research.dataset.rows import raise_bad_row
from twinkle_research.dataset.tasks.base import Task, TaskSource, held_out, is_held_out
from twinkle_research.dataset.tasks.build import build_task
from twinkle_research.errors import ConfigError
from twinkle_research.reward.arithmetic import evaluate


def sums(**options: object) -> SumsDataConfig:
    return SumsDataConfig(name="sums", **options)


def countdown(**options: object) -> CountdownDataConfig:
    return CountdownDataConfig(name="countdown", prompt="Make {target} from {numbers}.", **{"rows": 300, **options})


def gym(**options: object) -> ReasoningGymDataConfig:
    return ReasoningGymDataConfig(name="reasoning_gym", **{"dataset": "chain_sum", "rows": 20, "eval_rows": 4, **options})


def rows(config: GeneratedDataConfig, split: str = "train") -> list[dict]:
    task = build_task(config, split)
    return [task.row(i) for i in range(len(task))]


def prompts(config: GeneratedDataConfig, split: str = "train") -> list[str]:
    return [row["prompt"] for row in rows(config, split)]


def operands(prompt: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", prompt)]


# --- sums -----------------------------------------------------------------------------------------------------------


def test_the_default_is_two_digits_padded_and_reversed() -> None:
    """reference task add2r: f"{a:02d}+{b:02d}=" and f"{a + b:03d}"[::-1]."""
    config = to_object(compose(["data=sums"])).data
    every = rows(config) + rows(SumsDataConfig(**{**vars(config), "eval_rows": 900}), "eval")
    for row in every:
        a, b = operands(row["prompt"])
        assert row["prompt"] == f"{a:02d}+{b:02d}=" and row["answer"] == row["completion"] == f"{a + b:03d}"[::-1]
    assert config.eval_rows >= 500


def test_every_question_is_on_one_side_and_comes_once() -> None:
    config = sums(max_operand=30, eval_rows=60)
    train, held = prompts(config), prompts(config, "eval")
    everything = build_task(sums(max_operand=30, held_out=0.0), "train")
    assert len(everything) == 31**2
    assert len(set(train)) == len(train) and len(set(held)) == len(held) == 60
    assert not set(train) & set(held)
    all_held = 31**2 - len(train)
    assert abs(all_held / 31**2 - 0.1) < 0.03
    with pytest.raises(ConfigError, match=rf"data.eval_rows={all_held + 1}: give at most {all_held}\. There are 961 questions"):
        build_task(sums(max_operand=30, eval_rows=all_held + 1), "eval")
    assert len(build_task(sums(max_operand=30, eval_rows=all_held), "eval")) == all_held
    with pytest.raises(ConfigError, match=rf"data.rows={len(train) + 1}: give at most {len(train)}"):
        build_task(sums(max_operand=30, rows=len(train) + 1), "train")


@pytest.mark.parametrize("task", [Operation.add, Operation.multiply, Operation.mixed])
def test_the_same_numbers_in_another_order_are_on_the_same_side(task: Operation) -> None:
    config = sums(task=task, max_operand=19, eval_rows=30)

    def unordered(prompt: str) -> tuple:
        sign = re.search(r"[-+*]", prompt)[0]
        numbers = operands(prompt)
        return sign, *(numbers if sign == "-" else sorted(numbers))

    assert not set(map(unordered, prompts(config))) & set(map(unordered, prompts(config, "eval")))


def test_how_many_rows_are_asked_for_changes_no_row() -> None:
    few, many = sums(eval_rows=20, rows=50), sums(eval_rows=400)
    assert prompts(few) == prompts(many)[:50]
    assert prompts(few, "eval") == prompts(many, "eval")[:20]
    large = {"max_operand": 10**6}
    assert prompts(sums(rows=50, **large)) == prompts(sums(rows=3000, **large))[:50]


def test_the_seed_decides_which_and_nothing_else_does() -> None:
    config = {"rows": 100, "eval_rows": 100}
    first, again, other = (prompts(sums(seed=seed, **config)) for seed in (0, 0, 1))
    assert first == again != other
    held, other_held = (set(prompts(sums(seed=seed, **config), "eval")) for seed in (0, 1))
    assert len(held & other_held) < 40
    # Held-out questions of 2-digit sums are the same for ever, since models in the repository were trained on the others.
    text = "\n".join(prompts(sums(eval_rows=512, zero_padded=True), "eval"))
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "240bde2a15e9b14a"


def test_a_large_space_is_drawn_from() -> None:
    config = sums(max_operand=10**6, rows=3000, eval_rows=300, operands=3)
    train, held = prompts(config), prompts(config, "eval")
    assert len(set(train)) == 3000 and len(set(held)) == 300 and not set(train) & set(held)
    assert 4.8e5 < np.mean([n for prompt in train for n in operands(prompt)]) < 5.2e5
    with pytest.raises(ConfigError, match="data.rows=null: give at most"):
        build_task(sums(max_operand=10**6), "train")
    with pytest.raises(ConfigError, match="data.eval_rows=5: give at most 0"):
        build_task(sums(max_operand=10**6, rows=1, eval_rows=5, held_out=0.0), "eval")


@pytest.mark.parametrize(
    ("options", "prompt", "answer"),
    [
        ({"min_operand": 20, "max_operand": 20}, "20+20=", "40"),
        ({"min_operand": 20, "max_operand": 20, "spaced": True, "prompt": "What is {question}?"}, "What is 20 + 20?", "40"),
        ({"min_operand": 7, "max_operand": 7, "operands": 3, "task": Operation.multiply}, "7*7*7=", "343"),
        ({"min_operand": 7, "max_operand": 7, "operands": 3, "task": Operation.subtract}, "7-7-7=", "-7"),
        ({"min_operand": 60, "max_operand": 60, "reversed": True}, "60+60=", "021"),
    ],
)
def test_how_questions_are_written(options: dict, prompt: str, answer: str) -> None:
    row = rows(sums(held_out=0.0, **options))[0]
    assert (row["prompt"], row["answer"], row["completion"]) == (prompt, answer, answer)


@pytest.mark.parametrize("task", list(Operation))
def test_answers_are_right_and_padded_ones_equally_long(task: Operation) -> None:
    config = sums(task=task, max_operand=12, held_out=0.0, zero_padded=True)
    found = rows(config)
    apply = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}
    for row in found:
        left, sign, right = re.fullmatch(r"(\d\d)([-+*])(\d\d)=", row["prompt"]).groups()
        assert int(row["answer"]) == apply[sign](int(left), int(right))
    assert len({len(row["answer"]) for row in found}) == 1
    signs = Counter(re.search(r"[-+*]", row["prompt"])[0] for row in found)
    assert set(signs.values()) == {13 * 13} and len(signs) == (3 if task is Operation.mixed else 1)


# --- the split ------------------------------------------------------------------------------------------------------


def test_the_share_that_is_held_out() -> None:
    keys = np.arange(100_000, dtype=np.uint64)
    for share in (0.0, 0.1, 0.5):
        assert abs(held_out(keys, 3, share).mean() - share) < 0.005
        assert abs(np.mean([is_held_out(["question", i], 3, share) for i in range(5000)]) - share) < 0.02
    assert not np.array_equal(held_out(keys, 3, 0.1), held_out(keys, 4, 0.1))
    # What a small share holds out, a larger one does too.
    assert (held_out(keys, 3, 0.2) | ~held_out(keys, 3, 0.1)).all()


@pytest.mark.parametrize(
    "config", [sums(eval_rows=5, rows=9), countdown(eval_rows=5, rows=9), gym()], ids=["sums", "countdown", "gym"]
)
def test_tasks_as_sources(config: GeneratedDataConfig) -> None:
    train, again, held = (TaskSource(build_task(config, split)) for split in ("train", "train", "eval"))
    assert train.digest() == again.digest() != held.digest()
    assert list(train.rows(raise_bad_row)) == list(again.rows(raise_bad_row))
    assert str(next(held.rows(raise_bad_row))[0]) == f"{config.name}/eval[0]"
    changed = type(config)(**{**vars(config), "seed": 1})
    assert TaskSource(build_task(changed, "train")).digest() != train.digest()
    shown = type(config)(**{**vars(config), "preview": 1, "max_length": 99, "num_proc": 2, "shuffle": False})
    assert TaskSource(build_task(shown, "train")).digest() == train.digest()


# --- countdown ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"numbers": 2, "max_number": 9}, {"numbers": 6, "max_number": 50, "max_target": 999}])
def test_countdown_can_be_solved(options: dict) -> None:
    config = countdown(eval_rows=40, **options)
    for row in rows(config) + rows(config, "eval"):
        solved = evaluate(row["completion"])
        assert solved.value == Fraction(row["target"]) and sorted(solved.numbers) == sorted(row["numbers"])
        assert len(row["numbers"]) == config.numbers and max(row["numbers"]) <= config.max_number
        assert 1 <= row["target"] <= config.max_target
        assert row["prompt"] == f"Make {row['target']} from {', '.join(map(str, row['numbers']))}."


def test_countdown_is_one_question_whatever_the_order_of_its_numbers() -> None:
    config = countdown(numbers=2, max_number=6, rows=400, eval_rows=60)
    train, held = ({(*sorted(row["numbers"]), row["target"]) for row in rows(config, split)} for split in ("train", "eval"))
    assert len(train) > 20 and len(held) > 3 and not train & held


def test_countdown_rows_are_keyed_by_their_number() -> None:
    assert rows(countdown(rows=300))[:10] == rows(countdown(rows=10))
    assert rows(countdown(seed=1, rows=10)) != rows(countdown(rows=10))
    shipped = to_object(compose(["data=countdown"])).data
    row = build_task(shipped, "train").row(0)
    assert row["completion"] == f"<answer>{row['answer']}</answer>"


def test_countdown_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="no question with a target of at most data.max_target=1 found"):
        rows(countdown(numbers=8, max_number=1, max_target=1, held_out=0.0, rows=1, eval_rows=1), "eval")
    with pytest.raises(ConfigError, match="data=countdown has no end: give data.rows"):
        build_task(countdown(rows=None), "train")


# --- reasoning-gym --------------------------------------------------------------------------------------------------


def test_reasoning_gym_rows() -> None:
    config = gym(prompt="Q: {question}", options={"min_terms": 2, "max_terms": 2})
    found, held = rows(config), rows(config, "eval")
    assert len(found) == 20 and len(held) == 4
    assert not {row["prompt"] for row in found} & {row["prompt"] for row in held}
    for row in found + held:
        expression = re.fullmatch(r"Q: .*?: (-?\d+) ([-+]) (\d+) =", row["prompt"].replace("\n", " "))
        a, sign, b = expression.groups()
        assert row["answer"] == row["completion"] == str(int(a) + int(b) if sign == "+" else int(a) - int(b))
        assert set(row["reasoning_gym"]) == {"dataset", "seed", "options", "index"}


def test_reasoning_gym_makes_the_same_in_every_process() -> None:
    """polynomial_multiplication goes by the order of a set, which Python draws anew for each process."""
    program = (
        "from twinkle_research.dataset.config import ReasoningGymDataConfig as C\n"
        "from twinkle_research.dataset.tasks.build import build_task\n"
        "task = build_task(C(name='reasoning_gym', dataset='polynomial_multiplication', rows=4), 'train')\n"
        "print([task.row(i) for i in range(4)])\n"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dataset": "chain_sums"}, "data.dataset=chain_sums: did you mean 'chain_sum'"),
        ({"options": {"min_term": 2}}, "data.options: chain_sum does not take .*min_term"),
        ({"options": {"min_terms": 5, "max_terms": 2}}, "data.options: chain_sum does not take"),
        ({"rows": None}, "data=reasoning_gym has no end: give data.rows"),
    ],
)
def test_reasoning_gym_that_cannot_be(options: dict, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        build_task(gym(**options), "train")


def test_too_few_different_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinkle_research.dataset.tasks.reasoning_gym._SEARCHED", 3)
    with pytest.raises(ConfigError, match="data.eval_rows=4: only 0 of 72 questions of coin_flip are on that side"):
        build_task(gym(dataset="coin_flip", held_out=1e-9), "eval")


def test_every_kind_of_task_has_a_builder() -> None:
    for kind in GeneratedDataConfig.__subclasses__():
        assert issubclass(kind, (SumsDataConfig, CountdownDataConfig, ReasoningGymDataConfig))
    assert isinstance(build_task(sums(), "train"), Task)
    with pytest.raises(TypeError):
        build_task(GeneratedDataConfig(name="x"), "train")
