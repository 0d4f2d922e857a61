"""Sums, differences and products, made here."""

from __future__ import annotations

import operator
from functools import reduce

import numpy as np

from twinkle_research.dataset.config import Operation, SumsDataConfig
from twinkle_research.dataset.order import keyed_permutation
from twinkle_research.dataset.rows import Row
from twinkle_research.dataset.tasks.base import Task, held_out
from twinkle_research.errors import ConfigError
from twinkle_research.randomness import derive_seed

_SIGNS = {Operation.add: "+", Operation.subtract: "-", Operation.multiply: "*"}
_APPLY = {"+": operator.add, "-": operator.sub, "*": operator.mul}
ALL_AT_ONCE = 2**20  # questions, up to which each is listed once; of more, as many as are asked for are drawn


class Sums(Task):
    """``config.operands`` numbers in [min_operand, max_operand], joined by one operation.

    Sums (and products) of the same numbers in another order are on the same side of the split. No question comes twice.
    """

    def __init__(self, config: SumsDataConfig, split: str):
        self.signs = list(_SIGNS.values()) if config.task is Operation.mixed else [_SIGNS[config.task]]
        self.span = config.max_operand - config.min_operand + 1
        self.per_sign = self.span**config.operands
        self.config = config
        self.questions = self._questions(split, config.rows if split == "train" else config.eval_rows)
        super().__init__(config, split, len(self.questions))
        self.operand_width = len(str(config.max_operand)) if config.zero_padded else 0
        self.answer_width = max(len(str(v)) for v in self._extremes()) if config.zero_padded else 0

    @property
    def space(self) -> int:
        """How many questions there are."""
        return len(self.signs) * self.per_sign

    def row(self, index: int) -> Row:
        number = int(self.questions[index])
        sign, rest = self.signs[number // self.per_sign], number % self.per_sign
        operands = []
        for _ in range(self.config.operands):
            rest, digit = divmod(rest, self.span)
            operands.append(self.config.min_operand + digit)
        space = " " if self.config.spaced else ""
        question = f"{space}{sign}{space}".join(f"{value:0{self.operand_width}d}" for value in operands)
        answer = f"{reduce(_APPLY[sign], operands):0{self.answer_width}d}"
        answer = answer[::-1] if self.config.reversed else answer
        return {"prompt": self.config.prompt.replace("{question}", question), "answer": answer, "completion": answer}

    def keys(self, numbers: np.ndarray) -> np.ndarray:
        """The same number for questions that must be on the same side of the split."""
        which, rest = np.divmod(numbers, self.per_sign)
        digits = np.empty((len(numbers), self.config.operands), np.int64)
        for place in range(self.config.operands):
            rest, digits[:, place] = np.divmod(rest, self.span)
        commutes = np.array([sign != "-" for sign in self.signs])[which]
        digits = np.where(commutes[:, None], np.sort(digits, axis=1), digits)
        return (which * self.per_sign + digits @ (self.span ** np.arange(self.config.operands))).astype(np.uint64)

    def _questions(self, split: str, wanted: int | None) -> np.ndarray:
        """Numbers of the first ``wanted`` questions of a split (None: all), in an order that the seed decides."""
        share = self.config.held_out if split == "eval" else 1 - self.config.held_out
        if self.space <= ALL_AT_ONCE:
            found = self._of_split(keyed_permutation(self.space, self.config.seed, "questions"), split)
            if wanted is not None and wanted > len(found):
                raise ConfigError(self._too_many(split, wanted, len(found)))
            return found[:wanted]
        # A quarter, so that drawing soon finds enough that were not drawn before.
        if wanted is None or wanted > share * self.space / 4:
            raise ConfigError(self._too_many(split, wanted, int(share * self.space / 4)))
        draws, found = 2 * wanted, np.empty(0, np.int64)
        while len(found) < wanted:
            found, draws = self._of_split(self._drawn(draws), split), 2 * draws
        return found[:wanted]

    def _of_split(self, numbers: np.ndarray, split: str) -> np.ndarray:
        return numbers[held_out(self.keys(numbers), self.config.seed, self.config.held_out) == (split == "eval")]

    def _drawn(self, count: int) -> np.ndarray:
        """``count`` draws, of which each question counts once. More draws begin with the same ones."""
        draws = (np.random.PCG64(derive_seed(self.config.seed, "questions")).random_raw(count) % self.space).astype(np.int64)
        return draws[np.sort(np.unique(draws, return_index=True)[1])]

    def _too_many(self, split: str, wanted: int | None, limit: int) -> str:
        key = "data.rows" if split == "train" else "data.eval_rows"
        c = self.config
        return (
            f"{key}={'null' if wanted is None else wanted}: give at most {limit}. There are {self.space} questions "
            f"(data.min_operand={c.min_operand}, data.max_operand={c.max_operand}, data.operands={c.operands}), and "
            f"data.held_out={c.held_out}"
        )

    def _extremes(self) -> list[int]:
        low, high, count = self.config.min_operand, self.config.max_operand, self.config.operands
        values = {
            "+": [count * low, count * high],
            "-": [low - (count - 1) * high, high - (count - 1) * low],
            "*": [low**count, high**count],
        }
        return [value for sign in self.signs for value in values[sign]]
