"""Which characters of a rendered conversation are trained.

For assistant turn k the text that a sampler would have produced is the difference between two renderings: the
messages before k with the generation prompt, and the messages up to k. The turn is trained in the longest rendering
whose beginning is exactly that text. A template that keeps what it wrote (most do) gives one row a conversation. One
that drops thinking from earlier turns, or moves the system prompt to the last user message, gives several rows, so
that every trained token sees the context that it would have been sampled in.

A turn without thinking follows the generation prompt that switches thinking off, whatever the setting says: an empty
block that the template puts there is context. A template that takes thinking out of every answer that it shows (as
DeepSeek-R1's does) still says how it is sampled: the generation prompt, the thinking, and then the answer as shown.

``{% generation %}`` markers, where the template has them, choose among those characters; the end-of-turn marker is
always trained with the content that it ends.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from twinkle_research.errors import DataError
from twinkle_research.template.messages import Conversation, split_inline_thinking
from twinkle_research.template.rendering import PROBE, ChatRenderer, Messages, RenderError, inline_thinking
from twinkle_research.template.shown import ShownParts, Tools

Span = tuple[int, int]


@dataclass(frozen=True)
class TrainedTurn:
    """A sampler is given the text before ``start``, and that up to ``end`` is the turn; ``spans`` of it are trained.

    The model's own words start at ``first``; what is before it is an empty block of thinking, which is not to be learned.
    A turn without spans is context, in the tokens in which it was sampled.
    """

    start: int
    first: int
    end: int
    spans: list[Span]


@dataclass(frozen=True)
class TrainedText:
    """A text and the assistant turns in it."""

    text: str
    turns: list[TrainedTurn]


@dataclass(eq=False)
class _Turn:
    """One assistant turn in the rendering that ends with it. ``shown``: what the template itself has of its words."""

    text: str
    place: TrainedTurn
    shown: str

    def fits(self, text: str) -> bool:
        """True where ``text`` starts with this turn and all that it was sampled after."""
        return text.startswith(self.text[: self.place.end])

    def untrained(self) -> TrainedTurn:
        return replace(self.place, spans=[])


def trained_texts(shown: ShownParts, conversation: Conversation, train_on: str) -> list[TrainedText]:
    """One text where the template is append-only, several where it rewrites earlier messages; in conversation order.

    ``train_on``: "assistant" (each assistant turn), "last" (the last one), "all" (every character of the whole
    rendering). Messages after the last trained turn are left out: they do not influence what is trained.
    """
    renderer = shown.renderer
    messages, tools = renderer.adapt(conversation.messages), conversation.tools
    if train_on == "all":
        shown.check(messages, tools)
        text = renderer.render(messages, tools)
        return [TrainedText(text, [TrainedTurn(0, 0, len(text), [(0, len(text))])])]
    chosen = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    if not chosen:
        raise DataError("no assistant message to train on")
    chosen = [k for k in (chosen[-1:] if train_on == "last" else chosen) if conversation.weights[k]]
    remaining, context = [], _context_turns(renderer, conversation, messages[: max(chosen, default=0)], skip=chosen)
    for k in chosen:
        message = split_inline_thinking(conversation.messages[k])
        remaining.append(_locate(renderer, messages[: k + 1], tools, message))
        _verify(renderer, remaining[-1], message)
        shown.check(messages[: k + 1], tools)
    context += remaining
    rows: list[TrainedText] = []
    while remaining:
        text = remaining[-1].text
        fitting = [turn for turn in remaining if turn.fits(text)]
        remaining = [turn for turn in remaining if turn not in fitting]
        others = [turn.untrained() for turn in context if turn not in fitting and turn.fits(text)]
        rows.append(TrainedText(text, [turn.place for turn in fitting] + others))
    return rows[::-1]


def prompt_text(shown: ShownParts, conversation: Conversation) -> TrainedText:
    """What a sampler is given to write the next assistant turn."""
    renderer = shown.renderer
    messages, tools = renderer.adapt(conversation.messages), conversation.tools
    shown.check(messages, tools, add_generation_prompt=True)
    text = renderer.render(messages, tools, add_generation_prompt=True)
    turns = _context_turns(renderer, conversation, messages, skip=[])
    return TrainedText(text, [turn.untrained() for turn in turns if turn.fits(text)])


def _context_turns(renderer: ChatRenderer, conversation: Conversation, messages: Messages, skip: list[int]) -> list[_Turn]:
    """The assistant turns among ``messages`` that are not trained, as far as the template can show them."""
    turns = []
    for k, message in enumerate(messages):
        if message["role"] == "assistant" and k not in skip:
            try:
                own = split_inline_thinking(conversation.messages[k])
                turns.append(_locate(renderer, messages[: k + 1], conversation.tools, own))
            except DataError:
                continue  # what could not be trained may still be context
    return turns


def bridge_text(renderer: ChatRenderer, conversation: Conversation) -> tuple[str, str]:
    """The text up to the end of the last assistant turn, and what stands between it and the next generation prompt's end.

    ``conversation`` ends with the messages that answer the last assistant turn. The second text starts right after the
    end-of-turn marker (with the separator that the sampler never produced). Raises RenderError where the template
    rewrites what came before, so that appending would not give its rendering.
    """
    messages, tools = renderer.adapt(conversation.messages), conversation.tools
    turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    if not turns or turns[-1] == len(messages) - 1:
        raise DataError("bridging needs an assistant message that is followed by others")
    last = turns[-1]
    turn = _locate(renderer, messages[: last + 1], tools, split_inline_thinking(conversation.messages[last]))
    whole = renderer.render(messages, tools, add_generation_prompt=True)
    if not turn.fits(whole):
        raise RenderError(f"the chat template of {renderer.name} rewrites earlier messages; the next turn needs a new rendering")
    return whole[: turn.place.end], whole[turn.place.end :]


def _locate(renderer: ChatRenderer, messages: Messages, tools: Tools, message: dict[str, Any]) -> _Turn:
    """The last of ``messages``; ``message`` is the same as it stands in the data, with thinking in a key of its own."""
    facts = renderer.facts
    marks: list[Span] | None = None
    if renderer.has_markers(tools):
        text, marks = renderer.render_marked(messages, tools)
    else:
        text = renderer.render(messages, tools)
    prompts = _prompts(renderer, messages[:-1], tools)
    thought = message.get("reasoning_content", "").strip("\n")
    start, first, prompt = _start(renderer, messages[:-1], tools, text, prompts, bool(thought.strip()))
    if facts.thinking == "dropped" and (thought.strip() or len(prompt) > start):
        end = _end(renderer, text, start, message, marked=False)
        return _recomposed(renderer, text, (start, end), prompt, thought)
    end = _end(renderer, text, first, message, marks is not None)
    if marks is None:
        return _Turn(text, TrainedTurn(start, first, end, [(first, end)]), text[first:end])
    clipped = [(max(s, first), min(e, end)) for s, e in marks]
    spans = [(s, e) for s, e in clipped if s < e]
    if spans and text[spans[-1][1] : end] == facts.end:
        spans[-1] = (spans[-1][0], end)
    return _Turn(text, TrainedTurn(start, first, end, spans), text[first:end])


def _prompts(renderer: ChatRenderer, before: Messages, tools: Tools) -> dict[bool, str]:
    """What a sampler may be given after ``before``, for each value of enable_thinking that makes a difference."""
    facts, prompts = renderer.facts, {}
    for thinking in (True, False) if facts.thinking_switch else (renderer.enable_thinking,):
        try:
            prompts[thinking] = renderer.render(before, tools, add_generation_prompt=True, enable_thinking=thinking)
        except RenderError:
            continue  # a conversation that starts with the assistant, in a template that wants a user first
    return prompts


def _start(
    renderer: ChatRenderer, before: Messages, tools: Tools, text: str, prompts: dict[bool, str], has_thought: bool
) -> tuple[int, int, str]:
    """Where in ``text`` the model starts to write, where its own words start, and the generation prompt before it.

    The prompt is longer than the text before only where it opens the thinking and the rendering does not show it.
    """
    facts = renderer.facts
    matching = {thinking: prompt for thinking, prompt in prompts.items() if text.startswith(prompt)}
    if facts.has_prompt and matching:
        prompt = max(matching.values(), key=len)
        if has_thought and prompt == matching.get(False) != prompts.get(True, prompt):
            raise RenderError(
                f"the row has thinking, but with enable_thinking=false the chat template of {renderer.name} closes it before "
                "the answer starts; set data.enable_thinking=true or remove the thinking (data.processor)"
            )
        if not has_thought and facts.empty_block:
            plain = _before_content(renderer, before, tools)
            if len(plain) > len(prompt) and text.startswith(plain):
                return len(prompt), len(plain), prompt
        return len(prompt), len(prompt), prompt
    plain = _before_content(renderer, before, tools)
    if before and not facts.has_prompt:
        # Without a header the space before the content is the model's to write, as in "[/INST] answer".
        ending = renderer.render(before, tools)
        if text.startswith(ending) and plain.startswith(ending) and not plain[len(ending) :].strip():
            return len(ending), len(ending), ending
    if not text.startswith(plain):
        raise DataError(
            f"the chat template of {renderer.name} renders the messages before an assistant message differently with and "
            "without it, so what is trained cannot be told from its context"
        )
    if facts.has_prompt and prompts:
        prompt = prompts.get(renderer.enable_thinking) or next(iter(prompts.values()))
        if facts.thinking == "dropped" and prompt.startswith(plain):
            return len(plain), len(plain), prompt
        raise DataError(
            f"the chat template of {renderer.name} shows an answer after {plain[-40:]!r}, but lets the model write it after "
            f"{prompt[-40:]!r}, so the context of training would not be that of sampling"
        )
    return len(plain), len(plain), plain


def _before_content(renderer: ChatRenderer, before: Messages, tools: Tools) -> str:
    """The rendering up to where the content of a turn without thinking or calls starts."""
    return renderer.render([*before, {"role": "assistant", "content": PROBE}], tools).partition(PROBE)[0]


def _recomposed(renderer: ChatRenderer, text: str, place: Span, prompt: str, thought: str) -> _Turn:
    """The turn as it was sampled, in a template that shows it without its thinking: prompt, thinking, what is shown.

    ``place``: where ``text`` shows it.
    """
    start, end = place
    block = inline_thinking(thought, "")
    opened = next((n for n in range(len("<think>\n"), 0, -1) if prompt.endswith(block[:n])), 0)
    if not opened and (prompt != text[:start] or prompt.rstrip().endswith("</think>")):
        raise RenderError(
            f"the chat template of {renderer.name} does not show the thinking of an assistant message, and its generation prompt "
            f"({prompt[-40:]!r}) does not say where it would stand; remove it from the data (data.processor)"
        )
    body = block[opened:]
    first = len(prompt) if thought.strip() else len(prompt) + len(body)  # a block with nothing in it is not the model's
    last = len(prompt) + len(body) + end - start
    return _Turn(prompt + body + text[start:], TrainedTurn(len(prompt), first, last, [(first, last)]), text[start:end])


def _end(renderer: ChatRenderer, after: str, start: int, message: dict[str, Any], marked: bool) -> int:
    """End of the end-of-turn marker of ``message``, the last turn of ``after``."""
    facts = renderer.facts
    if facts.end and after.endswith(facts.tail) and len(after) - len(facts.tail) >= start:
        return len(after) - len(facts.tail) + len(facts.end)
    stripped = after.rstrip()
    own = "" if message.get("tool_calls") else message["content"].rstrip()  # a token that the content ends with is no marker
    if len(stripped) > start and any(stripped.endswith(t) and not own.endswith(t) for t in renderer.added_tokens):
        return len(stripped)  # another marker, as some templates have it after tool calls
    if marked:
        return len(after)
    raise DataError(
        f"the chat template of {renderer.name} puts no end-of-turn marker after an assistant message: a model trained on it "
        "would not learn to stop. Add a marker, or {% generation %} markers, to the template"
    )


def _verify(renderer: ChatRenderer, turn: _Turn, message: dict[str, Any]) -> None:
    """The trained text must hold all that the message says: nothing of the data is dropped in silence."""
    whole = turn.text[turn.place.start : turn.place.end]
    parts = {"thinking": [message.get("reasoning_content", "")], "content": [message["content"]]}
    parts["tool call"] = [call["function"]["name"] for call in message.get("tool_calls", [])]
    for kind, values in parts.items():
        text = whole if kind == "thinking" else turn.shown
        if any(value.strip() not in text for value in values):
            advice = " (or set data.enable_thinking=true)" if kind == "thinking" and not renderer.enable_thinking else ""
            raise RenderError(
                f"the chat template of {renderer.name} does not show the {kind} of an assistant message as it is; "
                f"remove it from the data (data.processor){advice} or use a model whose template has it"
            )
