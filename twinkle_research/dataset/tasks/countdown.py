"""Countdown, made here: numbers, and a target that some expression of all of them has."""

from __future__ import annotations

import random

from twinkle_research.dataset.config import CountdownDataConfig
from twinkle_research.dataset.rows import Row
from twinkle_research.dataset.tasks.base import Task, is_held_out
from twinkle_research.errors import ConfigError
from twinkle_research.randomness import derive_seed

_TRIES = 10_000


class Countdown(Task):
    """Row i is the first of the draws keyed by (seed, split, i, 0), (seed, split, i, 1), ... that can be used: whose target
    is in [1, max_target], and which is on this side of the split. The same numbers in another order with the same target are
    the same question, and on the same side; a question may come more than once."""

    def __init__(self, config: CountdownDataConfig, split: str):
        length = config.rows if split == "train" else config.eval_rows
        if length is None:
            raise ConfigError("data=countdown has no end: give data.rows")
        super().__init__(config, split, length)

    def row(self, index: int) -> Row:
        c = self.config
        for attempt in range(_TRIES):
            generator = random.Random(derive_seed(c.seed, "countdown", self.split, index, attempt))
            numbers = [generator.randint(1, c.max_number) for _ in range(c.numbers)]
            expression, target = _expression(numbers, generator)
            usable = expression is not None and 1 <= target <= c.max_target
            if usable and is_held_out([sorted(numbers), target], c.seed, c.held_out) == (self.split == "eval"):
                prompt = c.prompt.replace("{numbers}", ", ".join(map(str, numbers))).replace("{target}", str(target))
                answer = f"<answer>{expression}</answer>" if "<answer>" in c.prompt else expression
                return {"prompt": prompt, "answer": expression, "completion": answer, "numbers": numbers, "target": target}
        raise ConfigError(
            f"data=countdown: no question with a target of at most data.max_target={c.max_target} found for "
            f"data.numbers={c.numbers} and data.max_number={c.max_number}"
        )


def _expression(numbers: list[int], generator: random.Random) -> tuple[str | None, int]:
    """A random expression of all the numbers, each intermediate value a positive whole number, and its value; None where the
    draw led nowhere."""
    parts = [(str(number), number) for number in numbers]
    while len(parts) > 1:
        (left, a), (right, b) = (parts.pop(generator.randrange(len(parts))) for _ in range(2))
        sign = generator.choice("+-*/")
        if (sign == "-" and a <= b) or (sign == "/" and a % b):
            return None, 0
        value = {"+": a + b, "-": a - b, "*": a * b}[sign] if sign != "/" else a // b
        parts.append((f"({left} {sign} {right})", value))
    text, value = parts[0]
    return text[1:-1] if text.startswith("(") else text, value
