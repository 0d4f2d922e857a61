"""The layouts in which data sets store conversations, brought to one of two forms.

``{"messages": [...], "tools": [...]}`` for conversations, ``{"prompt": str, "completion": str}`` for plain text.
"""

from __future__ import annotations

import difflib
from typing import Any

from twinkle_research.errors import DataError, nearest, similar
from twinkle_research.template.messages import canonical_tool_calls, canonical_tools, parse_json

LAYOUTS = (
    "messages; conversations (from/value); prompt + completion; instruction (+ input) + output; query + response; "
    "question + answer"
)

_SHAREGPT_ROLES = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
    "model": "assistant", "function_call": "function_call", "observation": "tool", "tool": "tool", "function_response": "tool",
}  # fmt: skip
_QUESTION_ANSWER = (("query", "response"), ("question", "answer"), ("prompt", "response"))
# Layouts by what is asked and what is answered; the first whose columns are there is taken.
_PAIRS = (("prompt", "completion"), ("instruction", "output"), *_QUESTION_ANSWER)
_WHOLE = ("messages", "conversations")
_BESIDE = {"instruction": ("input", "history"), "query": ("history",), "question": ("history",)}
_ALWAYS = ("system", "tools")
_COLUMNS = tuple(dict.fromkeys([*_WHOLE, *(c for pair in _PAIRS for c in pair), "input", "history", *_ALWAYS]))


def unread_columns(row: dict[str, Any], prompt_only: bool = False) -> list[str]:
    """Columns with a value that ``to_trainable`` does not look at."""
    read = next(([key] for key in _WHOLE if row.get(key) is not None), None)
    if read is None:
        there = [pair for pair in _PAIRS if all(row.get(key) is not None for key in (pair[:1] if prompt_only else pair))]
        pair = there[0] if there else ()
        read = [*pair, *(_BESIDE.get(pair[0], ()) if pair else ())]
        if pair[1:] == ("response",):
            read.append("history")
    return [key for key, value in row.items() if value is not None and key not in (*read, *_ALWAYS)]


def like_a_column(name: str) -> str:
    """Text to put behind a message about what is nearly the name of a column that a layout has; else nothing."""
    return "" if name in _COLUMNS else similar(name, _COLUMNS)


def to_trainable(row: dict[str, Any], prompt_only: bool = False, train_context: bool = False) -> dict[str, Any]:
    """The row in one of the two forms. ``prompt_only``: the answer may be missing. ``train_context``: assistant turns in a
    prompt are not marked as such that are not trained.

    Raises DataError (without the row's origin) where no layout fits or a part is missing.
    """
    out = _convert(row, prompt_only, train_context)
    has_system = not _is_absent(row.get("system"))
    if "messages" not in out and (has_system or canonical_tools(row.get("tools"))):
        out = {"messages": _pair(row, out["prompt"], "completion")}
    if has_system:
        own = [i for i, message in enumerate(out["messages"]) if message.get("role") in ("system", "developer")]
        if own:
            raise DataError(f"'system' beside a system message (message {own[0]}, counted from 0); keep one of them")
        out["messages"] = [{"role": "system", "content": _text(row, "system")}, *out["messages"]]
    if row.get("tools") and "messages" in out:
        out["tools"] = row["tools"]
    return out


def _convert(row: dict[str, Any], prompt_only: bool, train_context: bool) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise DataError(f"a row must be an object with keys, got {type(row).__name__}")
    for key in ("messages", "conversations"):
        if row.get(key) is not None:
            return {"messages": to_messages(parse_json(row[key], key, list), key)}
    if row.get("prompt") is not None and (prompt_only or row.get("completion") is not None):
        return _prompt_completion(row, train_context)
    if row.get("instruction") is not None:
        _require(row, "output", "instruction", prompt_only)
        question = _text(row, "instruction")
        if not _is_absent(row.get("input")):
            question += "\n\n" + _text(row, "input")
        return {"messages": _pair(row, question, "output")}
    for question, answer in _QUESTION_ANSWER:
        if row.get(question) is not None and (prompt_only or row.get(answer) is not None):
            return {"messages": _pair(row, _text(row, question), answer)}
    for question, answer in (("prompt", "completion"), *_QUESTION_ANSWER):
        if row.get(question) is not None:
            _require(row, answer, question, prompt_only)
    _refuse_preference(row)
    keys = ", ".join(f"{k!r} (null)" if value is None else repr(k) for k, value in row.items()) or "none"
    close = next((text for key in row if (text := like_a_column(str(key)))), "")
    raise DataError(
        f"no known layout (keys: {keys}{close}). Known: {LAYOUTS}. Otherwise give a data.processor that returns one of them"
    )


def _require(row: dict[str, Any], key: str, other: str, prompt_only: bool) -> None:
    if row.get(key) is None and not prompt_only:
        _refuse_preference(row)
        close = difflib.get_close_matches(key, [str(name) for name in row if name != other], n=1, cutoff=0.6)
        hint = f"; the row has {close[0]!r}: did you mean that?" if close else ""
        raise DataError(f"{key!r} is null" if key in row else f"{other!r} without {key!r}{hint}")


def _refuse_preference(row: dict[str, Any]) -> None:
    if row.get("chosen") is not None and row.get("rejected") is not None:
        raise DataError(
            "a row with 'chosen' and 'rejected' is a preference: train on it with data=preference and loss=dpo (or simpo, orpo, "
            "cpo, kto_pair), or give a data.processor that returns one answer"
        )


def _prompt_completion(row: dict[str, Any], train_context: bool) -> dict[str, Any]:
    prompt, completion = row["prompt"], row.get("completion")
    if isinstance(prompt, str):
        return {"prompt": prompt} if completion is None else {"prompt": prompt, "completion": _text(row, "completion")}
    messages = to_messages(parse_json(prompt, "prompt", list), "prompt")
    # What stands in the prompt is context, assistant turns included.
    if not train_context:
        messages = [{**m, "weight": 0} if m.get("role") == "assistant" else m for m in messages]
    if isinstance(completion, str):
        messages.append({"role": "assistant", "content": completion})
    elif completion is not None:
        messages += to_messages(parse_json(completion, "completion", list), "completion")
    return {"messages": messages}


def _pair(row: dict[str, Any], question: str, answer: str) -> list[dict[str, Any]]:
    messages, history = [], row.get("history")
    history = () if _is_absent(history) else history if isinstance(history, tuple) else parse_json(history, "history", list)
    for i, turn in enumerate(history):
        if not isinstance(turn, list | tuple) or len(turn) != 2 or not all(isinstance(t, str) for t in turn):
            raise DataError(f"history[{i}] must be a pair of texts, [question, answer]")
        messages += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    messages.append({"role": "user", "content": question})
    if row.get(answer) is not None:
        messages.append({"role": "assistant", "content": _text(row, answer)})
    return messages


def to_messages(messages: list[Any], key: str) -> list[dict[str, Any]]:
    """Messages with roles. ``key``: where they stand in the row, for errors."""
    if not messages:
        raise DataError(f"{key!r} is empty")
    return [_message(m, f"{key}[{i}]") for i, m in enumerate(messages)]


def _message(message: Any, where: str) -> dict[str, Any]:
    message = parse_json(message, where, dict)
    if "role" in message or "from" not in message:
        return message
    if not isinstance(message["from"], str):
        raise DataError(f"{where}.from must be text, got {type(message['from']).__name__}")
    role = _SHAREGPT_ROLES.get(message["from"])
    if role is None:
        raise DataError(f"{where}.from is {message['from']!r}; {nearest(str(message['from']), _SHAREGPT_ROLES)}")
    value = message.get("value")
    if value is None:
        near = next((text for key in message if key != "from" and (text := similar(key, ("value",)))), "")
        raise DataError(f"{where} has no 'value' (keys: {', '.join(map(repr, message))}){near}")
    extra = {k: v for k, v in message.items() if k not in ("from", "value")}
    if role == "function_call":
        calls = (
            parse_json(value, where + ".value", dict)
            if not isinstance(value, list) and not str(value).lstrip().startswith("[")
            else value
        )
        calls = canonical_tool_calls([calls] if isinstance(calls, dict) else calls, where + ".value")
        return {**extra, "role": "assistant", "content": "", "tool_calls": calls}
    return {**extra, "role": role, "content": value}


def _is_absent(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value)


def _text(row: dict[str, Any], key: str) -> str:
    if not isinstance(row[key], str):
        raise DataError(f"{key!r} must be text, got {type(row[key]).__name__}")
    return row[key]
