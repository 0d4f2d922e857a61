"""Does a chat template show all that a conversation says? Asked once for each shape of conversation."""

from __future__ import annotations

from typing import Any

from twinkle_research.template.rendering import PROBE, ChatRenderer, Messages, RenderError

Tools = list[dict[str, Any]] | None


class ShownParts:
    """Renders a conversation with a probe in place of each text and name, and looks for the probes.

    The words of a conversation rarely decide what a template shows; its roles, calls and tools do. So one verdict is kept
    for each sequence of those. What an earlier assistant turn said may be left out (old thinking is), the rest may not.
    """

    def __init__(self, renderer: ChatRenderer):
        self.renderer = renderer
        self._verdicts: dict[Any, str | None] = {}

    def check(self, messages: Messages, tools: Tools, add_generation_prompt: bool = False) -> None:
        """``messages`` as the template gets them. Raises RenderError naming what it leaves out."""
        shape = tuple((m["role"], bool(m["content"]), len(m.get("tool_calls", ()))) for m in messages)
        key = (shape, len(tools or ()), add_generation_prompt)
        if key not in self._verdicts:
            self._verdicts[key] = self._hidden_part(messages, tools, add_generation_prompt)
        hidden = self._verdicts[key]
        if hidden is not None:
            raise RenderError(
                f"the chat template of {self.renderer.name} does not show {hidden}; remove it from the data (data.processor) "
                "or use a model whose template has it"
            )

    def _hidden_part(self, messages: Messages, tools: Tools, add_generation_prompt: bool) -> str | None:
        probes: dict[str, str] = {}  # probe -> what it stands for

        def probe(what: str) -> str:
            text = f"{PROBE}{len(probes)}{PROBE}"
            probes[text] = what
            return text

        def named(item: dict[str, Any], what: str) -> dict[str, Any]:
            return {**item, "function": {**item["function"], "name": probe(what)}}

        probed = []
        for i, message in enumerate(messages):
            role, is_last = message["role"], i == len(messages) - 1
            if message["content"] and role != "assistant":
                message = {**message, "content": probe(f"a message of role {role!r} at its place")}
            if message["content"] and is_last and role == "assistant":
                message = {**message, "content": probe("the content of an assistant message")}
            if is_last and "tool_calls" in message:
                calls = [named(call, "the tool call of an assistant message") for call in message["tool_calls"]]
                message = {**message, "tool_calls": calls}
            probed.append(message)
        tools = [named(tool, "the row's tools") for tool in tools] if tools else tools
        try:
            text = self.renderer.render(probed, tools, add_generation_prompt=add_generation_prompt)
        except RenderError:
            return None  # it reads a text that is a probe here; the conversation itself is rendered all the same
        return next((what for mark, what in probes.items() if mark not in text), None)
