"""Which characters of a rendered conversation are trained.

For assistant turn k the text that a sampler would have produced is the difference between two renderings: the
messages before k with the generation prompt, and the messages up to k. The turn is trained in the longest rendering
whose beginning is exactly that text. A template that keeps what it wrote (most do) gives one row a conversation. One
that drops thinking from earlier turns, or moves the system prompt to the last user message, gives several rows, so
that every trained token sees the context that it would have been sampled in.

``{% generation %}`` markers, where the template has them, choose among those characters; the end-of-turn marker is
always trained with the content that it ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from twinkle_research.errors import DataError
from twinkle_research.template.messages import Conversation, split_inline_thinking
from twinkle_research.template.rendering import PROBE, ChatRenderer, Cleaned, Messages, RenderError

Tools = list[dict[str, Any]] | None


@dataclass(frozen=True)
class TrainedText:
    """A text and the ascending character ranges of it that are trained."""

    text: str
    spans: list[tuple[int, int]]


@dataclass(eq=False)
class _Turn:
    """One assistant turn in the rendering that ends with it. Positions are those of the clean text."""

    rendering: Cleaned
    start: int  # end of the generation prompt
    end: int  # end of the end-of-turn marker
    spans: list[tuple[int, int]]

    def text(self) -> str:
        """What a sampler would have produced."""
        return self.rendering.raw[self.rendering.raw_start(self.start) : self.rendering.raw_end(self.end)]

    def fits(self, rendering: Cleaned) -> bool:
        """True where ``rendering`` starts with this turn and all that it was sampled after."""
        return rendering.clean.startswith(self.rendering.clean[: self.end])


def trained_texts(renderer: ChatRenderer, conversation: Conversation, train_on: str) -> list[TrainedText]:
    """One text where the template is append-only, several where it rewrites earlier messages; in conversation order.

    ``train_on``: "assistant" (each assistant turn), "last" (the last one), "all" (every character of the whole
    rendering). Messages after the last trained turn are left out: they do not influence what is trained.
    """
    messages, tools = renderer.adapt(conversation.messages), conversation.tools
    if train_on == "all":
        text = renderer.render(messages, tools)
        return [TrainedText(text, [(0, len(text))])]
    chosen = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    if not chosen:
        raise DataError("no assistant message to train on")
    if train_on == "last":
        chosen = chosen[-1:]
    remaining = []
    for k in (k for k in chosen if conversation.weights[k]):
        remaining.append(_locate(renderer, messages, k, tools))
        _verify(renderer, remaining[-1], conversation.messages[k], tools)
    rows: list[TrainedText] = []
    while remaining:
        rendering = remaining[-1].rendering
        fitting = [turn for turn in remaining if turn.fits(rendering)]
        remaining = [turn for turn in remaining if turn not in fitting]
        spans = [(rendering.raw_start(s), rendering.raw_end(e)) for turn in fitting for s, e in turn.spans]
        rows.append(TrainedText(rendering.raw, spans))
    return rows[::-1]


def bridge_text(renderer: ChatRenderer, conversation: Conversation) -> str:
    """What stands between a sampled assistant turn and the next generation prompt's end.

    ``conversation`` ends with the messages that answer the last assistant turn. The text starts right after the
    end-of-turn marker (with the separator that the sampler never produced). Raises RenderError where the template
    rewrites what came before, so that appending would not give its rendering.
    """
    messages, tools = renderer.adapt(conversation.messages), conversation.tools
    turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    if not turns or turns[-1] == len(messages) - 1:
        raise DataError("bridging needs an assistant message that is followed by others")
    turn = _locate(renderer, messages, turns[-1], tools)
    whole = Cleaned(renderer.render(messages, tools, add_generation_prompt=True), renderer.facts.injected)
    if not turn.fits(whole):
        raise RenderError(f"the chat template of {renderer.name} rewrites earlier messages; the next turn needs a new rendering")
    return whole.raw[whole.raw_end(turn.end) :]


def _locate(renderer: ChatRenderer, messages: Messages, k: int, tools: Tools) -> _Turn:
    marks: list[tuple[int, int]] | None = None
    if renderer.has_markers(tools):
        text, marks = renderer.render_marked(messages[: k + 1], tools)
    else:
        text = renderer.render(messages[: k + 1], tools)
    rendering = Cleaned(text, renderer.facts.injected)
    start = _start(renderer, messages[:k], tools, rendering.clean)
    end = _end(renderer, rendering.clean, start, marks is not None)
    if marks is None:
        return _Turn(rendering, start, end, [(start, end)])
    clipped = [(max(rendering.clean_position(s), start), min(rendering.clean_position(e), end)) for s, e in marks]
    spans = [(s, e) for s, e in clipped if s < e]
    if spans and rendering.clean[spans[-1][1] : end] == renderer.facts.end:
        spans[-1] = (spans[-1][0], end)
    return _Turn(rendering, start, end, spans)


def _start(renderer: ChatRenderer, before: Messages, tools: Tools, after: str) -> int:
    """Length of the generation prompt and all that comes before it; ``after`` is the clean rendering with the turn."""
    facts = renderer.facts
    lengths = []
    if facts.has_prompt:
        # A turn without thinking follows the prompt that switches it off, whatever the setting says.
        for thinking in (True, False) if facts.thinking_switch else (renderer.enable_thinking,):
            try:
                prompt = renderer.render(before, tools, add_generation_prompt=True, enable_thinking=thinking)
            except RenderError:
                continue  # a conversation that starts with the assistant, in a template that wants a user first
            clean = Cleaned(prompt, facts.injected).clean
            if after.startswith(clean):
                lengths.append(len(clean))
    if lengths:
        return max(lengths)
    # No generation prompt, or one that the history does not show: where the content of a plain turn would start.
    probe = renderer.render([*before, {"role": "assistant", "content": PROBE}], tools)
    plain = Cleaned(probe, facts.injected).clean.partition(PROBE)[0]
    if not after.startswith(plain):
        raise DataError(
            f"the chat template of {renderer.name} renders the messages before an assistant message differently with and "
            "without it, so what is trained cannot be told from its context"
        )
    if facts.has_prompt or not before:
        return len(plain)
    # Without a header the space before the content is the model's to write, as in "[/INST] answer".
    ending = Cleaned(renderer.render(before, tools), facts.injected).clean
    return len(ending) if plain.startswith(ending) and not plain[len(ending) :].strip() else len(plain)


def _end(renderer: ChatRenderer, after: str, start: int, marked: bool) -> int:
    """End of the end-of-turn marker of the last turn of ``after``."""
    facts = renderer.facts
    if facts.end and after.endswith(facts.tail) and len(after) - len(facts.tail) >= start:
        return len(after) - len(facts.tail) + len(facts.end)
    stripped = after.rstrip()
    if len(stripped) > start and any(stripped.endswith(token) for token in renderer.added_tokens):
        return len(stripped)  # another marker, as some templates have it after tool calls
    if marked:
        return len(after)
    raise DataError(
        f"the chat template of {renderer.name} puts no end-of-turn marker after an assistant message: a model trained on it "
        "would not learn to stop. Add a marker, or {% generation %} markers, to the template"
    )


def _verify(renderer: ChatRenderer, turn: _Turn, message: dict[str, Any], tools: Tools) -> None:
    """The trained text must hold all that the message says: nothing of the data is dropped in silence."""
    text = turn.text()
    plain = split_inline_thinking(message)
    parts = {"thinking": [plain.get("reasoning_content", "")], "content": [plain["content"]]}
    parts["tool call"] = [call["function"]["name"] for call in message.get("tool_calls", [])]
    for kind, values in parts.items():
        if any(value.strip() not in text for value in values):
            raise RenderError(
                f"the chat template of {renderer.name} does not show the {kind} of an assistant message as it is; "
                f"remove it from the data (data.processor) or use a model whose template has it"
            )
    for tool in tools or ():
        if tool["function"]["name"] not in turn.rendering.raw:
            raise RenderError(
                f"the chat template of {renderer.name} does not show the row's tools; remove 'tools' from the data "
                "(data.processor) or use a model whose template has them"
            )
