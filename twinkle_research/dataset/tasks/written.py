"""Tasks whose rows somebody has written down: GSM8K, MATH, and any rows with a prompt and an answer.

Each class is called with a row and returns ``prompt`` (text) or ``messages``, ``answer``, ``completion`` (a right one, for
supervised training) and the row's other columns. DataErrors are without the row's origin, which the caller knows.
"""

from __future__ import annotations

from typing import Any

from twinkle_research.dataset.rows import Row
from twinkle_research.errors import DataError, nearest

QUESTION = "{question}"


class Gsm8kRows:
    """``question`` and ``answer``: a solution that ends in ``#### result``. ``prompt``: what is asked, {question} in it."""

    def __init__(self, prompt: str):
        self.prompt = prompt

    def __call__(self, row: Row) -> Row:
        question, solution = _text(row, "question"), _text(row, "answer")
        _, marker, result = solution.rpartition("####")
        result = result.strip().replace(",", "")
        if not marker or not result:
            raise DataError("'answer' must end in '#### ' and the result")
        rest = {k: v for k, v in row.items() if k not in ("question", "answer")}
        return {**rest, "prompt": self.prompt.replace(QUESTION, question), "answer": result, "completion": solution}


class MathRows:
    """``problem`` and ``solution``, which has its result in ``\\boxed{}``; a column ``answer`` is taken before that."""

    def __init__(self, prompt: str):
        self.prompt = prompt

    def __call__(self, row: Row) -> Row:
        problem, solution = _text(row, "problem"), _text(row, "solution")
        answer = row.get("answer")
        if answer is None:
            answer = last_boxed(solution)
        if not isinstance(answer, str | int | float) or not str(answer).strip():
            raise DataError("'solution' has no result in \\boxed{}, and there is no column 'answer'")
        rest = {k: v for k, v in row.items() if k not in ("problem", "answer")}
        prompt = self.prompt.replace(QUESTION, problem)
        return {**rest, "prompt": prompt, "answer": str(answer), "completion": solution}


class PromptRows:
    """``prompt_key``: column with the prompt, text or messages (or a column ``messages``). ``answer_key``: column with the
    answer, None where there is none. ``completion`` is the row's own, else the answer where it is text."""

    def __init__(self, prompt_key: str = "prompt", answer_key: str | None = "answer"):
        self.prompt_key = prompt_key
        self.answer_key = answer_key

    def __call__(self, row: Row) -> Row:
        key = self.prompt_key if row.get(self.prompt_key) is not None else "messages"
        prompt = row.get(key)
        if prompt is None:
            raise DataError(f"no prompt in column '{self.prompt_key}' (data.prompt_key); {nearest(self.prompt_key, row)}")
        new = {k: v for k, v in row.items() if k not in (self.prompt_key, "messages", self.answer_key)}
        if isinstance(prompt, str):
            new["prompt"] = prompt
        else:
            new["messages"] = _prompt_messages(prompt, key)
        if self.answer_key is None:
            return new
        answer = row.get(self.answer_key)
        if answer is None:
            raise DataError(
                f"no answer in column '{self.answer_key}' (data.answer_key); {nearest(self.answer_key, row)}. "
                "For rows without answers write data.answer_key=null"
            )
        new["answer"] = answer
        if row.get("completion") is None and isinstance(answer, str | int | float):
            new["completion"] = str(answer)
        if "messages" in new and new.get("completion") is not None:
            new["prompt"] = new.pop("messages")  # the layout of a prompt of messages with a completion
        return new


def last_boxed(text: str) -> str | None:
    """What stands in the last ``\\boxed{...}`` (or ``\\fbox{...}``, or ``\\boxed x``) of a text, braces balanced."""
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if start < 0:
        return None
    rest = text[start:].removeprefix("\\boxed").removeprefix("\\fbox").lstrip()
    if not rest.startswith("{"):
        return rest.split()[0].rstrip("$.") if rest.split() else None
    depth = 0
    for i, character in enumerate(rest):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[1:i].strip()
    return None


def _prompt_messages(prompt: Any, key: str) -> list[Any]:
    if not isinstance(prompt, list) or not prompt:
        raise DataError(f"'{key}' must be text or a list of messages, got {type(prompt).__name__}")
    last = prompt[-1]
    if isinstance(last, dict) and last.get("role", last.get("from")) in ("assistant", "gpt"):
        raise DataError(f"'{key}' ends with an assistant turn; a prompt ends before it")
    return prompt


def _text(row: Row, key: str) -> str:
    value = row.get(key)
    if not isinstance(value, str):
        found = "is missing" if value is None else f"must be text, got {type(value).__name__}"
        raise DataError(f"'{key}' {found}; {nearest(key, row) if value is None else 'see the option of the group data'}")
    return value
