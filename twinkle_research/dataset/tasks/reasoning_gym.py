"""Any data set of the package reasoning-gym."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from twinkle_research.dataset.config import ReasoningGymDataConfig
from twinkle_research.dataset.rows import Row
from twinkle_research.dataset.tasks.base import SPLITS, Task, is_held_out
from twinkle_research.errors import ConfigError, UserError, nearest

_PROGRAM = Path(__file__).with_name("gym_questions.py")
_SEARCHED = 200  # questions made for each that is wanted, before giving up


class Question(NamedTuple):
    index: int  # in the data set of reasoning-gym
    question: str
    answer: str


class ReasoningGym(Task):
    """Row i is the i-th of the data set's questions 0, 1, 2, ... (its own seed is ``config.seed``) that is on this side of the
    split. Its text decides the side, so no text is on both; within a side one may come more than once.

    ``answer`` is the package's own, empty where it has none; ``reasoning_gym`` says which question it is, for the package to
    judge an answer. Needs the package reasoning-gym.
    """

    def __init__(self, config: ReasoningGymDataConfig, split: str):
        if find_spec("reasoning_gym") is None:
            raise UserError("data=reasoning_gym needs the package reasoning-gym: pip install 'twinkle_research[rewards]'")
        length = config.rows if split == "train" else config.eval_rows
        if length is None:
            raise ConfigError("data=reasoning_gym has no end: give data.rows")
        super().__init__(config, split, length)
        options = json.dumps(dict(config.options), sort_keys=True)
        counts = (config.rows or 0, config.eval_rows)
        self.questions = _questions(config.dataset, config.seed, options, config.held_out, counts)[SPLITS.index(split)]

    def row(self, index: int) -> Row:
        number, question, answer = self.questions[index]
        c = self.config
        which = {"dataset": c.dataset, "seed": c.seed, "options": dict(c.options), "index": number}
        prompt = c.prompt.replace("{question}", question)
        return {"prompt": prompt, "answer": answer, "completion": answer, "reasoning_gym": which}

    def digest(self) -> str:
        from importlib.metadata import version

        return f"{super().digest()}-{version('reasoning-gym')}"


@lru_cache(maxsize=2)
def _questions(
    dataset: str, seed: int, options: str, share: float, counts: tuple[int, int]
) -> tuple[list[Question], list[Question]]:
    """``counts`` questions of the two splits."""
    found: tuple[list[Question], list[Question]] = ([], [])
    searched = _SEARCHED * sum(counts)
    with _made(dataset, seed, options) as made:
        for number, (question, answer) in enumerate(made):
            side = found[is_held_out(question, seed, share)]
            if len(side) < counts[side is found[1]]:
                side.append(Question(number, question, answer))
            if (len(found[0]), len(found[1])) == counts:
                return found
            if number == searched:
                break
    short = 0 if len(found[0]) < counts[0] else 1
    key = ("data.rows", "data.eval_rows")[short]
    raise ConfigError(
        f"{key}={counts[short]}: only {len(found[short])} of {searched} questions of {dataset} are on that side of the split; "
        "they are too much alike"
    )


@contextmanager
def _made(dataset: str, seed: int, options: str) -> Iterator[Iterator[tuple[str, str]]]:
    """Questions and answers as they are made by a process, which ends with the context."""
    words = [sys.executable, "-P", str(_PROGRAM), dataset, str(seed), options]
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield _lines(process, dataset, options)
        finally:
            process.terminate()


def _lines(process: subprocess.Popen[str], dataset: str, options: str) -> Iterator[tuple[str, str]]:
    for line in process.stdout:
        made = json.loads(line)
        if isinstance(made, dict) and made["names"]:
            raise ConfigError(f"data.dataset={dataset}: {nearest(dataset, made['names'])}")
        if isinstance(made, dict):
            raise ConfigError(f"data.options: {dataset} does not take {options}: {made['error']}")
        yield made[0], made[1]
    said = process.stderr.read().strip().splitlines()
    raise UserError(f"data=reasoning_gym: {dataset} failed to make a question: {said[-1] if said else 'it ended'}")
