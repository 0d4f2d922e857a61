"""What a tokenizer's chat template does with a conversation, found out by rendering, never by parsing the template.

Templates disagree about nearly everything: where the system prompt stands, whether old thinking is dropped, what
ends a turn, what the generation prompt adds. The facts that labels need are measured once on a probe conversation
(TurnFacts); all else comes from renderings of the row itself.
"""

from __future__ import annotations

import datetime
import json
import os
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from twinkle_research.errors import DataError
from twinkle_research.template.messages import REASONING_KEYS, split_inline_thinking

_MARKERS = re.compile(r"{%-?\s*generation\s*-?%}")
# Probe texts. Private-use characters: no template and no data set writes them.
PROBE, _USER_1, _TURN_1, _USER_2, _TURN_2, _THOUGHT = (f"\ue000{c}\ue001" for c in "abcdef")
# What templates that print today's date get, so that a run continued on another day trains on the same tokens.
_DATE = datetime.date(2025, 1, 1)
# What a template's own code can raise.
_RENDER_ERRORS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)

Messages = list[dict[str, Any]]


class RenderError(DataError):
    """The chat template refuses a conversation (for example a system message, or roles that do not alternate)."""


@dataclass(frozen=True)
class TurnFacts:
    """What surrounds the content of an assistant turn.

    ``tail``: text after the content of the last turn. ``end``: its leading part that ends the turn and is trained
    (the model must learn to stop), without the separator that follows. ``has_prompt``: add_generation_prompt has an
    effect. ``thinking_switch``: the generation prompt differs with enable_thinking.
    ``thinking``: where thinking must stand to be shown: a key of the message, "inline" (in the content); "dropped" where
    a ``<think>`` block is taken out of every answer that is shown, "none" where the template does something else to it.
    ``empty_block``: a turn without thinking gets a block with nothing in it, which is not the model's.
    ``json_arguments``: tool-call arguments must be JSON text instead of objects. ``null_content``: the empty content
    of a turn with tool calls must be None.
    """

    tail: str
    end: str
    has_prompt: bool
    thinking_switch: bool
    thinking: str
    empty_block: bool
    json_arguments: bool
    null_content: bool


class ChatRenderer:
    """Renders conversations with one tokenizer's template. ``name`` stands for the template in messages."""

    def __init__(self, tokenizer: Any, name: str, enable_thinking: bool):
        self.tokenizer = tokenizer
        self.name = name
        self.enable_thinking = enable_thinking
        self._special = dict(tokenizer.special_tokens_map)

    def template_text(self, tools: list[dict[str, Any]] | None) -> str:
        return self.tokenizer.get_chat_template(tools=tools)

    def has_markers(self, tools: list[dict[str, Any]] | None) -> bool:
        return _MARKERS.search(self.template_text(tools)) is not None

    def render(self, messages: Messages, tools: list[dict[str, Any]] | None = None, **options: Any) -> str:
        """Text of the whole conversation. ``options``: add_generation_prompt, enable_thinking."""
        return self._render(messages, tools, False, options)[0]

    def render_marked(self, messages: Messages, tools: list[dict[str, Any]] | None = None) -> tuple[str, list[tuple[int, int]]]:
        """The text and the character ranges inside ``{% generation %}`` blocks."""
        return self._render(messages, tools, True, {})

    def _render(self, messages: Messages, tools: Any, marked: bool, options: dict[str, Any]) -> tuple[str, list[tuple[int, int]]]:
        arguments = {**self._special, "enable_thinking": self.enable_thinking, "strftime_now": _DATE.strftime, **options}
        try:
            texts, spans = render_jinja_template(
                conversations=[messages],
                tools=tools,
                chat_template=self.template_text(tools),
                return_assistant_tokens_mask=marked,
                **arguments,
            )
        except _RENDER_ERRORS as exc:
            raise RenderError(f"the chat template of {self.name} refuses the conversation: {exc}") from exc
        return texts[0], [tuple(s) for s in spans[0]] if marked else []

    def adapt(self, messages: Messages) -> Messages:
        """Hands thinking and tool-call arguments over in the form that this template shows."""
        return [self._adapt_turn(m) if m["role"] == "assistant" else m for m in messages]

    def _adapt_turn(self, message: dict[str, Any]) -> dict[str, Any]:
        form = self.facts.thinking
        if form in REASONING_KEYS or form == "dropped":
            message = split_inline_thinking(message)
        if form not in ("none", "dropped") and "reasoning_content" in message:
            thinking = message["reasoning_content"]
            message = {k: v for k, v in message.items() if k != "reasoning_content"}
            if form == "inline":
                message["content"] = inline_thinking(thinking.strip("\n"), message["content"])
            else:
                message[form] = thinking
        if "tool_calls" in message:
            message = {**message, "tool_calls": [self._adapt_call(call) for call in message["tool_calls"]]}
            if self.facts.null_content and not message["content"]:
                message["content"] = None
        return message

    def _adapt_call(self, call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        if self.facts.json_arguments:
            function = {**function, "arguments": to_json(function["arguments"])}
        return {**call, "function": function}

    @cached_property
    def added_tokens(self) -> list[str]:
        return [t for t in self.tokenizer.get_added_vocab() if t.strip()]

    @cached_property
    def facts(self) -> TurnFacts:
        """Measured once. Raises DataError naming the template where it cannot render the simplest conversation."""
        user, turn = {"role": "user", "content": _USER_1}, {"role": "assistant", "content": _TURN_1}
        single = self.render([user, turn])
        if single.count(_TURN_1) != 1:
            raise DataError(
                f"the chat template of {self.name} does not show an assistant's content once; it cannot be trained on"
            )
        tail = single.split(_TURN_1)[1]
        before_end = None
        try:
            double = self.render([user, turn, {"role": "user", "content": _USER_2}, {"role": "assistant", "content": _TURN_2}])
        except RenderError:
            double = None  # a template for single exchanges
        if double is not None and all(double.count(mark) == 1 for mark in (_TURN_1, _USER_2)):
            before_end = _between(double, _TURN_1, _USER_2)
        prompts = [self.render([user], add_generation_prompt=True, enable_thinking=flag) for flag in (True, False)]
        plain = [self.render([user], enable_thinking=flag) for flag in (True, False)]
        thinking, empty_block = self._thinking_form(user, single)
        json_arguments, null_content = self._call_form(user, single)
        return TurnFacts(
            tail=tail,
            end=_turn_end(tail, before_end, self.added_tokens),
            has_prompt=prompts != plain,
            thinking_switch=prompts[0] != prompts[1],
            thinking=thinking,
            empty_block=empty_block,
            json_arguments=json_arguments,
            null_content=null_content,
        )

    def _thinking_form(self, user: dict[str, Any], plain: str) -> tuple[str, bool]:
        """(form, empty_block) of TurnFacts; ``plain`` is the rendering of the same turn without thinking."""
        for key in REASONING_KEYS:
            text = self.render([user, {"role": "assistant", "content": _TURN_1, key: _THOUGHT}])
            if _THOUGHT in text:
                return key, _squeezed(text.replace(_THOUGHT, "")) == _squeezed(plain)
        inline = {"role": "assistant", "content": inline_thinking(_THOUGHT, _TURN_1)}
        text = self.render([user, inline])
        if _THOUGHT in text:
            return "inline", False
        return "dropped" if _squeezed(text) == _squeezed(plain) else "none", False

    def _call_form(self, user: dict[str, Any], plain: str) -> tuple[bool, bool]:
        """(arguments as JSON text, empty content as None): the first form in which a tool call is shown whole.

        None comes first: that is what a turn without content has, and some templates take "" for an answer of its own.
        """
        arguments = {_TURN_1: _TURN_2}
        for null_content in (True, False):
            for json_arguments in (False, True):
                function = {"name": PROBE, "arguments": to_json(arguments) if json_arguments else arguments}
                calls = [{"id": "call00001", "type": "function", "function": function}]
                message = {"role": "assistant", "content": None if null_content else "", "tool_calls": calls}
                try:
                    text = self.render([user, message])
                except RenderError:
                    continue
                # Python's repr, which some templates would give, shows these characters as escapes.
                shown = PROBE in text and _TURN_1 in text and _TURN_2 in text
                if shown and all(text.count(word) <= plain.count(word) for word in ("None", "null")):
                    return json_arguments, null_content
        return False, False  # no tool calls at all: rows that have some are refused one by one


def to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def inline_thinking(thinking: str, content: str) -> str:
    return f"<think>\n{thinking}\n</think>\n\n{content}"


def _between(text: str, left: str, right: str) -> str:
    return text[text.index(left) + len(left) : text.index(right)]


def _turn_end(tail: str, tail_inside: str | None, tokens: list[str]) -> str:
    """The part of ``tail`` that ends a turn.

    ``tail_inside``: what follows a turn that is not the last. What both share and ends in an added token is the
    end marker; text that only the last turn has (an end-of-text after the whole conversation) is not part of it.
    """
    common = tail if tail_inside is None else os.path.commonprefix([tail, tail_inside])
    ends = [common.rindex(t) + len(t) for t in tokens if t in common]
    if ends:
        return common[: max(ends)] if tail_inside is not None else _first(tail, tokens)
    return _first(tail, tokens) or common.rstrip() or common


def _first(text: str, tokens: list[str]) -> str:
    """``text`` up to its first (and there longest) token; '' where it has none."""
    found = [(text.index(t), -len(t)) for t in tokens if t in text]
    if not found:
        return ""
    start, minus_length = min(found)
    return text[: start - minus_length]


def _squeezed(text: str) -> str:
    """``text`` without white space, which templates treat as they like around a block that is empty or gone."""
    return "".join(text.split())
