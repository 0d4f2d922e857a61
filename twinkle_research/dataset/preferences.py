"""Rows with a better and a worse answer to one prompt, and their two features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from twinkle_research.dataset.formats import to_messages, to_trainable, unread_columns
from twinkle_research.errors import DataError
from twinkle_research.template.base import RowResult, Template
from twinkle_research.template.tokens import Tokens

SIDES = ("chosen", "rejected")
LAYOUTS = (
    "prompt (text or messages) + chosen + rejected (texts or messages); chosen + rejected (whole conversations); "
    "messages, conversations, or instruction (+ input) + chosen + rejected"
)


def to_pair(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The row as two, chosen and rejected, in the forms of ``to_trainable``. What stands before the answers is context.

    Raises DataError (without the row's origin) where a part is missing, or the two do not share a prompt.
    """
    if not isinstance(row, dict):
        raise DataError(f"a row must be an object with keys, got {type(row).__name__}")
    for side in SIDES:
        if row.get(side) is None:
            keys = ", ".join(map(repr, row)) or "none"
            raise DataError(f"{side!r} is null" if side in row else f"no {side!r} in the row (keys: {keys}). Known: {LAYOUTS}")
    answers = [_answer(row[side], side) for side in SIDES]
    if all(_is_whole(answer) for answer in answers):
        prompt, answers = _shared(row, answers)
        return [_with_extras(row, prompt, answer) for answer in answers]
    for side, answer in zip(SIDES, answers, strict=True):
        if _is_whole(answer):
            raise DataError(f"{side!r} is a whole conversation, but the other answer is not")
    return _beside_prompt(row, answers)


def encode_pairs(template: Template, rows: Sequence[Any]) -> list[RowResult]:
    """For each row both features or none."""
    errors: dict[int, DataError] = {}
    sides: list[dict[str, Any]] = []
    for i, row in enumerate(rows):
        try:
            sides += to_pair(row)
        except DataError as exc:
            errors[i] = exc
    found = iter(template.encode_rows(sides))
    return [RowResult(error=errors[i]) if i in errors else _joined(template, next(found), next(found)) for i in range(len(rows))]


def unread_beside_pairs(row: dict[str, Any]) -> list[str]:
    """Columns with a value that ``to_pair`` does not look at."""
    prompt = {key: value for key, value in row.items() if key not in SIDES}
    if "prompt" in prompt:
        read = ("prompt", "system", "tools")
        return [key for key, value in prompt.items() if value is not None and key not in read]
    return unread_columns(prompt, prompt_only=True)


# --- one row ----------------------------------------------------------------------------------------------------------


def _answer(value: Any, side: str) -> list[dict[str, Any]]:
    """As messages; a text is one of the assistant."""
    if isinstance(value, str):
        return [{"role": "assistant", "content": value}]
    if isinstance(value, dict):
        return to_messages([value], side)
    if not isinstance(value, list):
        raise DataError(f"{side!r} must be text or messages, got {type(value).__name__}")
    return to_messages(value, side)


def _is_whole(answer: list[dict[str, Any]]) -> bool:
    return answer[0].get("role") != "assistant"


def _shared(row: dict[str, Any], answers: list[list[dict[str, Any]]]) -> tuple[list[dict], list[list[dict]]]:
    """Whole conversations cut where they begin to differ."""
    chosen, rejected = answers
    n = next((i for i, (a, b) in enumerate(zip(chosen, rejected)) if a != b), min(len(chosen), len(rejected)))
    if n == min(len(chosen), len(rejected)):
        if len(chosen) != len(rejected):
            raise DataError("one of 'chosen' and 'rejected' is only the beginning of the other")
        n = max(i for i, m in enumerate(chosen) if m.get("role") != "assistant") + 1  # the same answer twice
    prompt, rest = chosen[:n], [chosen[n:], rejected[n:]]
    for side, messages in zip(SIDES, rest, strict=True):
        if messages and messages[0].get("role") != "assistant":
            raise DataError(f"{side}[{n}] is not the assistant's, and differs: a pair must share all that is before its answers")
    given = row.get("prompt")
    if given is not None and not _names(given, prompt):
        raise DataError("'prompt' is not what 'chosen' and 'rejected' begin with; leave it out, or give only the answers there")
    return prompt, rest


def _names(given: Any, prompt: list[dict[str, Any]]) -> bool:
    if isinstance(given, str):
        return any(m.get("content") == given for m in prompt)
    return to_messages(given, "prompt") == prompt if isinstance(given, list) else False


def _beside_prompt(row: dict[str, Any], answers: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    if row.get("prompt") is not None:
        rest = {key: row.get(key) for key in ("prompt", "system", "tools")}
    else:
        rest = {key: value for key, value in row.items() if key not in (*SIDES, "completion", "output", "response", "answer")}
    try:
        prompt = to_trainable(rest, prompt_only=True)
    except DataError as exc:
        if "no known layout" not in str(exc):
            raise
        raise DataError(f"no prompt beside 'chosen' and 'rejected'. Known: {LAYOUTS}") from exc
    if "messages" not in prompt and all(isinstance(row[side], str) for side in SIDES):
        return [{"prompt": prompt["prompt"], "completion": row[side]} for side in SIDES]
    messages = prompt.get("messages") or [{"role": "user", "content": prompt["prompt"]}]
    if messages[-1].get("role") == "assistant":
        raise DataError("the prompt ends with a message of the assistant, so no answer of its own can follow")
    return [_conversation_of(messages, answer, prompt.get("tools")) for answer in answers]


def _with_extras(row: dict[str, Any], prompt: list[dict[str, Any]], answer: list[dict[str, Any]]) -> dict[str, Any]:
    """With the row's ``system`` and ``tools``."""
    extras = {key: row[key] for key in ("system", "tools") if row.get(key) is not None}
    known = to_trainable({"messages": prompt, **extras}, prompt_only=True)
    return _conversation_of(known["messages"], answer, known.get("tools"))


def _conversation_of(prompt: list[dict[str, Any]], answer: list[dict[str, Any]], tools: Any) -> dict[str, Any]:
    context = [{**m, "weight": 0} if m.get("role") == "assistant" else m for m in prompt]
    return {"messages": [*context, *answer], **({} if tools is None else {"tools": tools})}


# --- its features -----------------------------------------------------------------------------------------------------


def _joined(template: Template, chosen: RowResult, rejected: RowResult) -> RowResult:
    sides = dict(zip(SIDES, (chosen, rejected), strict=True))
    for side, result in sides.items():
        if result.error is not None:
            return RowResult(error=DataError(f"{side}: {result.error}"))
    for side, result in sides.items():
        if result.dropped is not None:
            return RowResult(dropped=f"{side}: {result.dropped}")
    for side, result in sides.items():
        if len(result.tokens) > 1:
            text = f"{side}: this chat template rewrites earlier turns, so an answer of several turns gives several rows"
            return RowResult(error=DataError(f"{text}; give the last turn alone as the answer"))
    good, bad = chosen.tokens[0], rejected.tokens[0]
    error = _other_prompt(template, good, bad)
    if error is not None:
        return RowResult(error=error)
    if np.array_equal(good.ids, bad.ids):
        return RowResult(dropped="the same answer chosen and rejected")
    return RowResult(tokens=[good, bad], cut=chosen.cut or rejected.cut, control=chosen.control or rejected.control)


def _other_prompt(template: Template, chosen: Tokens, rejected: Tokens) -> DataError | None:
    """Both must condition on the same tokens: what is before the first trained one."""
    prompts = [t.ids[: int(t.trained.argmax())] for t in (chosen, rejected)]
    if np.array_equal(*prompts):
        return None
    shorter = min(map(len, prompts))
    differ = np.flatnonzero(prompts[0][:shorter] != prompts[1][:shorter])
    at = int(differ[0]) if len(differ) else shorter
    shown = " and ".join(repr(template.decode(ids[at : at + 8].tolist())) for ids in prompts)
    return DataError(
        f"the chat template writes the prompt in another way before 'chosen' than before 'rejected': from token {at} on they are "
        f"{shown}. Where only one answer has thinking, give both of them some, or none"
    )
