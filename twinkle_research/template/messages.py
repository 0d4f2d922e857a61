"""Messages as they stand in data -> one canonical form: text content, tool-call arguments as dicts, known roles."""

from __future__ import annotations

import difflib
import json
import re
import sys
from dataclasses import dataclass
from typing import Any

from twinkle_research.errors import DataError, nearest, similar

ROLES = ("system", "developer", "user", "assistant", "tool")
# Other names under which data sets store the same thing.
_ROLE_ALIASES = {"function": "tool"}
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
# A key that is none of these goes to the chat template, unless it is nearly one of them.
_KEYS = ("role", "content", "tool_calls", "tool_call_id", "name", "weight", *REASONING_KEYS)
_ALIKE = 0.75
_INLINE_THINKING = re.compile(r"\s*<think>(.*?)</think>", re.DOTALL)


@dataclass
class Conversation:
    """Canonical messages. ``weights[i]`` is False where message i says that it must not be trained."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    weights: list[bool]


@dataclass
class TextPair:
    """Plain text before and after the point where training starts; ``completion`` is None for a prompt."""

    prompt: str
    completion: str | None


def canonical(row: Any) -> Conversation | TextPair:
    """``row``: a mapping with ``messages`` (and ``tools``), or with text ``prompt`` and ``completion``.

    Raises DataError (without the row's origin, which the caller knows).
    """
    if not isinstance(row, dict):
        raise DataError(f"a row must be an object with keys, got {_kind(row)}")
    if "messages" not in row and isinstance(row.get("prompt"), str):
        completion = row.get("completion")
        if completion is not None and not isinstance(completion, str):
            raise DataError(f"'completion' must be text like 'prompt', got {_kind(completion)}")
        return TextPair(row["prompt"], completion)
    if "messages" not in row:
        close = next((text for key in row if (text := similar(key, ("messages", "prompt")))), "")
        raise DataError(f"no 'messages' in the row; keys: {', '.join(map(str, row)) or 'none'}{close}")
    messages = parse_json(row["messages"], "messages", list)
    if not messages:
        raise DataError("'messages' is empty")
    pairs = [_message(m, f"messages[{i}]") for i, m in enumerate(messages)]
    return Conversation([m for m, _ in pairs], canonical_tools(row.get("tools")), [w for _, w in pairs])


def canonical_tools(tools: Any) -> list[dict[str, Any]] | None:
    """OpenAI-style tool list; a JSON string is parsed, a flat ``{"name", ...}`` is wrapped. None where there is none."""
    if not tools:
        return None
    tools = parse_json(tools, "tools", list)
    out = []
    for i, tool in enumerate(tools):
        tool = parse_json(tool, f"tools[{i}]", dict)
        function = tool.get("function", tool)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise DataError(f"tools[{i}] needs a function with a 'name'")
        out.append(tool if "function" in tool else {"type": "function", "function": tool})
    return out or None


def canonical_tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """``[{"type": "function", "function": {"name": str, "arguments": dict}}]``, the order of arguments kept."""
    out = []
    for i, call in enumerate(parse_json(calls, where, list)):
        at = f"{where}[{i}]"
        call = parse_json(call, at, dict)
        function = parse_json(call.get("function", call), f"{at}.function", dict)
        name = function.get("name")
        if not isinstance(name, str) or not name:
            raise DataError(f"{at} needs a function 'name'")
        arguments = function.get("arguments", function.get("parameters"))
        arguments = {} if arguments in (None, "") else parse_json(arguments, f"{at} ({name}) arguments", dict)
        known = {k: v for k, v in call.items() if k == "id" and v is not None}
        out.append({**known, "type": "function", "function": {"name": name, "arguments": arguments}})
    return out


def parse_json(value: Any, where: str, kind: type) -> Any:
    """``value`` itself, or what its JSON text says, checked to be of ``kind`` (list or dict)."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as exc:
            raise DataError(f"{where} is text that is not valid JSON: {exc.msg} at character {exc.pos}") from exc
        except (ValueError, RecursionError) as exc:
            raise DataError(f"{where} is text that cannot be read as JSON: {unreadable_json(exc)}") from exc
    if not isinstance(value, kind):
        raise DataError(f"{where} must be {'a list' if kind is list else 'an object'}, got {_kind(value)}")
    return value


def unreadable_json(exc: ValueError | RecursionError) -> str:
    """Why json refused text that may well be valid JSON."""
    if isinstance(exc, RecursionError):
        return "JSON is nested too deeply"
    return f"a number has more than {sys.get_int_max_str_digits()} digits"


def split_inline_thinking(message: dict[str, Any]) -> dict[str, Any]:
    """Moves ``<think>...</think>`` from the start of an assistant's content to ``reasoning_content``."""
    match = _INLINE_THINKING.match(message["content"])
    if message["role"] != "assistant" or "reasoning_content" in message or match is None:
        return message
    rest = message["content"][match.end() :]
    return {**message, "reasoning_content": match.group(1).strip("\n"), "content": rest.lstrip("\n")}


def _message(message: Any, where: str) -> tuple[dict[str, Any], bool]:
    message = parse_json(message, where, dict)
    for key in message:
        if key not in _KEYS and (close := difflib.get_close_matches(str(key), _KEYS, n=1, cutoff=_ALIKE)):
            raise DataError(f"{where}: unknown key {key!r}; did you mean {close[0]!r}?")
    # Columnar files give every message every key; an absent one is None there.
    message = {k: v for k, v in message.items() if v is not None}
    role = message.get("role")
    role = _ROLE_ALIASES.get(role, role) if isinstance(role, str) else role
    if role not in ROLES:
        raise DataError(f"{where}.role is {role!r}; {nearest(str(role), ROLES)}")
    if "content" not in message and not (role == "assistant" and any(map(message.get, ("tool_calls", *REASONING_KEYS)))):
        others = " (nor tool_calls nor reasoning_content)" if role == "assistant" else ""
        raise DataError(f"{where} ({role}) has no content{others}; its keys: {', '.join(message)}")
    out = {**message, "role": role, "content": _text(message.get("content", ""), f"{where}.content")}
    for key in REASONING_KEYS:
        value = out.pop(key, None)
        if value:
            if not isinstance(value, str) or role != "assistant":
                raise DataError(f"{where}.{key} must be text on an assistant message")
            out["reasoning_content"] = value
    if out.get("tool_calls"):
        if role != "assistant":
            raise DataError(f"{where}: only assistant messages have tool_calls, this one is {role!r}")
        out["tool_calls"] = canonical_tool_calls(out["tool_calls"], f"{where}.tool_calls")
    else:
        out.pop("tool_calls", None)
    weight = out.pop("weight", 1)
    if weight not in (0, 1):
        raise DataError(f"{where}.weight must be 0 (not trained) or 1, got {weight!r}")
    return out, bool(weight)


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise DataError(f"{where} must be text, got {_kind(content)}")
    parts = []
    for i, part in enumerate(content):
        if isinstance(part, str):
            parts.append(part)
        elif isinstance(part, dict) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
            parts.append(part["text"])
        else:
            kind = part.get("type") if isinstance(part, dict) else _kind(part)
            raise DataError(f"{where}[{i}] is of type {kind!r}; only text is supported")
    return "".join(parts)


def _kind(value: Any) -> str:
    if isinstance(value, str):
        return f"text {value[:40]!r}"
    return {type(None): "null", bool: "a boolean", int: "a number", float: "a number", list: "a list", dict: "an object"}.get(
        type(value), type(value).__name__
    )
