"""What is trained, for random conversations and many template styles: exactly what the model would have generated."""

import json
import random

import pytest
from chat_styles import STYLES, make_metaspace_tokenizer, make_tokenizer

from twinkle_research.data_format import IGNORE_INDEX
from twinkle_research.dataset.encoding import encode_chunk
from twinkle_research.errors import DataError
from twinkle_research.template import Template

# Style -> (how an assistant turn is generated, has a system role, shows thinking, shows tool calls).
CHATML_LIKE = ["chatml", "chatml_marked", "chatml_marked_short", "chatml_marked_wide", "auto_system", "final_eos", "no_prompt"]
ENDS = {
    **dict.fromkeys([*CHATML_LIKE, "text_arguments", "null_content", "thinking", "thinking_marked", "thinking_open"], "<|end|>"),
    **dict.fromkeys(["inst", "inst_system_last", "thinking_lost"], "<eos>"),
    **dict.fromkeys(["channels", "channels_thinking"], "<|return|>"),
    "headers": "<|turn_end|>", "model_role": "</turn>", "plain_text": "###",
}  # fmt: skip
WITH_TOOLS = [*CHATML_LIKE, "text_arguments", "thinking", "thinking_marked", "thinking_open", "headers"]
NO_SYSTEM = ["inst", "model_role", "thinking_lost"]
BOS_IN_TEMPLATE = ["headers", "inst", "inst_system_last", "model_role", "thinking_lost"]
TRIMMED = ["headers", "model_role"]
OWN_THINKING = ["thinking", "thinking_marked", "thinking_open", "channels_thinking"]
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "d", "parameters": {"type": "object"}}}]
WORDS = ["Paris", "is", "the", "capital", "France", "ü", "日本", "🦊", "\n", "\n\n", "  ", "a:b", "###x", "don't", "</p>", "{"]


def random_text(rng: random.Random) -> str:
    return "".join(rng.choice(WORDS) + rng.choice([" ", "", "\n"]) for _ in range(rng.randint(1, 8)))


def random_row(rng: random.Random, style: str) -> dict:
    messages = []
    if style not in NO_SYSTEM and rng.random() < 0.5:
        messages.append({"role": "system", "content": random_text(rng)})
    tools = style in WITH_TOOLS and rng.random() < 0.5
    for _ in range(rng.randint(1, 4)):
        messages.append({"role": "user", "content": random_text(rng)})
        if tools and rng.random() < 0.5:
            for _ in range(rng.randint(1, 2)):
                messages.append(turn := random_turn(rng, style, content=rng.choice([None, "", "Let me see."])))
                arguments = {"city": random_text(rng), "days": rng.choice([3, "3", None])}
                arguments = rng.choice([arguments, json.dumps(arguments)])
                turn["tool_calls"] = [{"type": "function", "function": {"name": "weather", "arguments": arguments}}]
                messages.append({"role": "tool", "content": random_text(rng)})
        messages.append(random_turn(rng, style, random_text(rng)))
    return {"messages": messages, "tools": TOOLS} if tools else {"messages": messages}


def random_turn(rng: random.Random, style: str, content: str | None) -> dict:
    turn = {"role": "assistant", "content": content}
    if style != "thinking_lost" and rng.random() < 0.4:
        thought = "So: " + random_text(rng).strip("\n")
        if rng.random() < 0.5:
            turn["reasoning_content"] = thought
        else:
            turn["content"] = f"<think>\n{thought}\n</think>\n\n{content or ''}"
    return turn


def generated(style: str, message: dict) -> str:
    """What a sampler would have produced for this turn, written down without the code under test."""
    content, thought = message["content"] or "", message.get("reasoning_content", "")
    if content.startswith("<think>\n"):
        thought, content = content.removeprefix("<think>\n").split("\n</think>\n\n", 1)
        content = content.lstrip("\n") if style in OWN_THINKING else content
    if style == "channels_thinking":
        analysis = f"<|head|>analysis<|/head|>{thought}<|end|><|start|>assistant" if thought else ""
        return analysis + "<|head|>final<|/head|>" + content + ENDS[style]
    if style in OWN_THINKING:
        block = f"<think>\n{thought}\n</think>\n\n" if thought.strip() else ""
        text = block.removeprefix("<think>\n" if style == "thinking_open" else "") + content
    else:
        text = f"<think>\n{thought}\n</think>\n\n{content}" if thought else content
    text = text.strip() if style in TRIMMED else text
    for call in message.get("tool_calls", []):
        arguments = call["function"]["arguments"]
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        if style == "headers":
            text += json.dumps({"name": "weather", "parameters": arguments}, ensure_ascii=False)
        else:
            text += "\n<call>" + json.dumps({"name": "weather", "arguments": arguments}, ensure_ascii=False) + "</call>"
    prefix = {"inst": " ", "inst_system_last": " ", "channels": "<|head|>final<|/head|>"}.get(style, "")
    return prefix + text + ENDS[style]


def trained_runs(template: Template, features: list[dict]) -> list[tuple[list[int], str]]:
    """(ids before, text) of each run of trained tokens, over all features."""
    runs = []
    for feature in features:
        ids, labels = feature["input_ids"], feature["labels"]
        position = 0
        while position < len(ids) - 1:
            if labels[position] == IGNORE_INDEX:
                position += 1
                continue
            end = position
            while labels[end] != IGNORE_INDEX:
                assert labels[end] == ids[end + 1]  # pre-shifted
                end += 1
            runs.append((ids[: position + 1], template.decode(ids[position + 1 : end + 1])))
            position = end
        assert labels[-1] == IGNORE_INDEX
    return runs


@pytest.mark.parametrize("style", sorted(set(STYLES) - {"no_end"}))
def test_trained_text_is_what_would_have_been_generated(style: str) -> None:
    tokenizer = make_tokenizer(style)
    template = Template(tokenizer=tokenizer, max_length=None)
    rng = random.Random(style)
    for _ in range(60):
        row = random_row(rng, style)
        features = template.encode_all(row)
        turns = [m for m in row["messages"] if m["role"] == "assistant"]
        runs = trained_runs(template, features)
        assert sorted(text for _, text in runs) == sorted(generated(style, m) for m in turns), row
        assert {ids.count(tokenizer.bos_token_id) for ids, _ in runs} == {int(style in BOS_IN_TEMPLATE)}


@pytest.mark.parametrize("style", [*WITH_TOOLS[:5], "headers", "model_role", "channels", "plain_text", "thinking_open"])
def test_context_of_each_trained_turn_is_the_sampling_prompt(style: str) -> None:
    """Also where the template rewrites what came before. Token for token in a feature's first turn: a later prompt that
    is encoded from text may join an earlier answer and its prompt in other tokens than those of the answer itself."""
    template = Template(tokenizer=make_tokenizer(style), max_length=None)
    rng = random.Random(style)
    for _ in range(40):
        row = random_row(rng, style)
        if style == "thinking_open" and not all(thinks(m) for m in row["messages"] if m["role"] == "assistant"):
            continue  # without thinking, the prompt is that of enable_thinking=False
        prompts = []
        for k, message in enumerate(row["messages"]):
            if message["role"] == "assistant":
                prompts.append(template.encode({**row, "messages": row["messages"][:k]}, add_generation_prompt=True)["input_ids"])
        runs = [trained_runs(template, [f]) for f in template.encode_all(row)]
        assert [template.decode(ids) for run in runs for ids, _ in run] == [template.decode(ids) for ids in prompts]
        assert all(run[0][0] in prompts for run in runs)


def thinks(message: dict) -> bool:
    return bool(message.get("reasoning_content")) or (message["content"] or "").startswith("<think>")


def row_of(*contents: str, **extra: object) -> dict:
    roles = ["user", "assistant"] * len(contents)
    return {"messages": [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)], **extra}


def texts(style: str, row: dict, **options: object) -> list[list[str]]:
    """Trained runs of each feature."""
    template = Template(tokenizer=make_tokenizer(style), max_length=None, **options)
    return [[text for _, text in trained_runs(template, [f])] for f in template.encode_all(row)]


@pytest.mark.parametrize("style", ["thinking", "thinking_open"])
def test_stripped_thinking_gives_each_turn_a_row_of_its_own(style: str) -> None:
    """S08: the first turn is trained with its thinking; the second does not see it."""
    template = Template(tokenizer=make_tokenizer(style))
    row = row_of("u1", "<think>\nt1\n</think>\n\na1", "u2", "<think>\nt2\n</think>\n\na2")
    features = template.encode_all(row)
    first, second = (template.decode(f["input_ids"]) for f in features)
    assert "t1" in first and "u2" not in first
    assert "t1" not in second and "t2" in second
    assert template.decode(features[1]["input_ids"]) == template.tokenizer.apply_chat_template(row["messages"], tokenize=False)


@pytest.mark.parametrize("scheme", ["always", "first", "never"])
def test_tokenizers_that_mark_words_by_a_leading_space(scheme: str) -> None:
    """As sentencepiece does: the mark that such a tokenizer puts before the first word after a special token is no reason
    to cut the text."""
    row = row_of("u one", "a one", "u two", "\n a two")
    for style, answers in (("chatml", ["a one<|end|>", "\n a two<|end|>"]), ("inst", [" a one<eos>", " \n a two<eos>"])):
        tokenizer = make_metaspace_tokenizer(style, scheme)
        template = Template(tokenizer=tokenizer)
        (feature,) = template.encode_all(row)
        assert [text for _, text in trained_runs(template, [feature])] == answers
        whole = tokenizer(tokenizer.apply_chat_template(row["messages"], tokenize=False), add_special_tokens=False)
        assert feature["input_ids"] == whole["input_ids"]


def test_thinking_inside_one_round_of_tool_calls_stays_in_one_row() -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    row = {
        "tools": TOOLS,
        "messages": [
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": "", "reasoning_content": "t1", "tool_calls": [call]},
            {"role": "tool", "content": "rain"},
            {"role": "assistant", "content": "It rains.", "reasoning_content": "t2"},
        ],
    }
    (runs,) = texts("thinking", row)
    assert len(runs) == 2 and "t1" in runs[0] and runs[1] == "<think>\nt2\n</think>\n\nIt rains.<|end|>"


@pytest.mark.parametrize("style", ["thinking", "thinking_marked", "thinking_open"])
@pytest.mark.parametrize("enable_thinking", [True, False])
def test_injected_empty_thinking_is_context(style: str, enable_thinking: bool) -> None:
    """The block that switches thinking off is before each turn without thinking, as in its prompt, and is not trained."""
    template = Template(tokenizer=make_tokenizer(style), enable_thinking=enable_thinking)
    off = Template(tokenizer=make_tokenizer(style), enable_thinking=False)
    row = row_of("u1", "a1", "u2", "a2")
    runs = trained_runs(template, template.encode_all(row))
    assert [text for _, text in runs] == ["a1<|end|>", "a2<|end|>"]
    for (ids, _), k in zip(runs, (1, 3), strict=True):
        assert template.decode(ids).endswith("<|start|>assistant\n<think>\n\n</think>\n\n")
        assert ids == off.encode({"messages": row["messages"][:k]}, add_generation_prompt=True)["input_ids"]


def test_thinking_that_is_shown_nowhere_is_trained_as_it_was_sampled() -> None:
    """As in DeepSeek-R1's template: the prompt opens the thinking, and every answer is shown without it."""
    template = Template(tokenizer=make_tokenizer("thinking_lost"))
    row = row_of("u1", "<think>\nt1\n</think>\n\na1", "u2", "a2")
    runs = trained_runs(template, template.encode_all(row))
    assert [(template.decode(ids), text) for ids, text in runs] == [
        ("<bos>[INST]u1[/INST]<think>\n", "t1\n</think>\n\na1<eos>"),
        ("<bos>[INST]u1[/INST]a1<eos>[INST]u2[/INST]<think>\n\n</think>\n\n", "a2<eos>"),
    ]
    for (ids, _), k in zip(runs, (1, 3), strict=True):
        prompt = template.encode({"messages": row["messages"][:k]}, add_generation_prompt=True)["input_ids"]
        assert ids[: len(prompt)] == prompt
    other = STYLES["thinking_lost"].replace("'[/INST]<think>\\n'", "'[/INST]<plan>\\n'")
    with pytest.raises(DataError, match="lets the model write it after|does not say where it would stand"):
        Template(tokenizer=make_tokenizer(other)).encode_all(row)


def test_a_text_that_looks_like_an_end_is_none() -> None:
    """A closing tag in an answer is not the block that is put before it; a token that an answer ends with is no end marker."""
    with pytest.raises(DataError, match="does not show the content"):
        Template(tokenizer=make_tokenizer("thinking_lost")).encode_all(row_of("u", "</think>"))
    with pytest.raises(DataError, match="no end-of-turn marker"):
        Template(tokenizer=make_tokenizer("no_end")).encode_all(row_of("u", "a<|end|>"))


def test_what_a_message_says_must_be_shown_at_its_place() -> None:
    """Whatever the words: a role that the template leaves out, a second call of the same tool, tools of a prompt."""
    no_tool_role = STYLES["chatml"].replace("{%- for m in messages -%}", "{%- for m in messages if m.role != 'tool' -%}")
    call = {"type": "function", "function": {"name": "weather", "arguments": {}}}
    rows = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    rows += [{"role": "tool", "content": "u"}, {"role": "assistant", "content": "a"}]
    with pytest.raises(DataError, match="does not show a message of role 'tool'"):
        Template(tokenizer=make_tokenizer(no_tool_role)).encode_all({"messages": rows, "tools": TOOLS})
    one_call = STYLES["chatml"].replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")
    row = {"messages": [rows[0], {**rows[1], "tool_calls": [call, call]}]}
    with pytest.raises(DataError, match="does not show the tool call"):
        Template(tokenizer=make_tokenizer(one_call)).encode_all(row)
    with pytest.raises(DataError, match="does not show the row's tools"):
        prompt = {"messages": rows[:1], "tools": TOOLS}
        Template(tokenizer=make_tokenizer("model_role")).encode(prompt, add_generation_prompt=True)


def test_thinking_where_the_setting_closes_it_is_refused() -> None:
    closed = STYLES["chatml"].replace(
        "m.content }}", "('<think></think>' if not enable_thinking and m.role == 'assistant' else '') + m.content }}"
    )
    closed = closed.removesuffix("{%- endif -%}") + "{{ '<think></think>' if not enable_thinking }}{%- endif -%}"
    row = row_of("u", "<think>\nt\n</think>\n\na")
    assert texts(closed, row) == [["<think>\nt\n</think>\n\na<|end|>"]]
    with pytest.raises(DataError, match="enable_thinking=false.*closes it"):
        texts(closed, row, enable_thinking=False)


def test_moved_system_prompt_is_seen_by_every_turn() -> None:
    template = Template(tokenizer=make_tokenizer("inst_system_last"))
    row = {"messages": [{"role": "system", "content": "Be brief."}, *row_of("u1", "a1", "u2", "a2")["messages"]]}
    contexts = [template.decode(ids) for ids, _ in trained_runs(template, template.encode_all(row))]
    assert contexts == [
        "<bos>[INST] Be brief.\n\nu1 [/INST]",
        "<bos>[INST] u1 [/INST] a1<eos>[INST] Be brief.\n\nu2 [/INST]",
    ]


def test_last_turn_only_and_all_tokens() -> None:
    row = row_of("u1", "a1", "u2", "a2", "trailing question")
    assert texts("chatml", row, train_on="last") == [["a2<|end|>"]]
    template = Template(tokenizer=make_tokenizer("chatml"), train_on="all")
    (feature,) = template.encode_all(row)
    assert feature["labels"][:-1] == feature["input_ids"][1:]
    assert template.decode(feature["input_ids"]) == template.tokenizer.apply_chat_template(row["messages"], tokenize=False)


def test_weight_zero_leaves_a_turn_out() -> None:
    row = row_of("u1", "a1", "u2", "a2")
    row["messages"][1]["weight"] = 0
    assert texts("chatml", row) == [["a2<|end|>"]]


def test_weight_zero_is_refused_where_every_token_is_trained() -> None:
    """Which tokens of a rendering belong to a message cannot be told for every role."""
    template = Template(tokenizer=make_tokenizer("chatml"), train_on="all")
    row = row_of("u1", "a1", "u2", "a2")
    for number in (1, 2):
        weighted = {"messages": [m | ({"weight": 0} if i == number else {}) for i, m in enumerate(row["messages"])]}
        with pytest.raises(DataError, match=rf"messages\[{number}\].weight is 0 \(not trained\), but with train_on=all every"):
            template.encode_all(weighted)
        assert template.encode_all(weighted, add_generation_prompt=True)
    # A prompt's own assistant turns are marked by us, not by the data.
    pair = {"prompt": row["messages"][:3], "completion": row["messages"][3:]}
    chunk = encode_chunk(template, [pair, row], False)
    assert chunk.errors == [] and chunk.lengths[0] == chunk.lengths[1] and chunk.trained.all()
    pair["prompt"][1]["weight"] = 0
    assert [i for i, _ in encode_chunk(template, [row, pair], False).errors] == [0, 1]  # they share the message


def test_markers_choose_what_is_trained_inside_a_turn() -> None:
    """An author who leaves the thinking out of the markers does not get it trained."""
    marked = "}}{{ m.reasoning_content }}{% generation %}{{ m.content }}{% endgeneration %}"
    template = STYLES["chatml"].replace("+ m.content }}", marked)
    row = row_of("u", "a")
    row["messages"][1]["reasoning_content"] = "hidden"
    assert texts(template, row) == [["a<|end|>"]]


def test_conversation_that_starts_with_the_assistant() -> None:
    row = {"messages": [{"role": "assistant", "content": "Welcome!"}, *row_of("u", "a")["messages"]]}
    for style in ("chatml", "model_role", "no_prompt", "channels", "auto_system"):
        turns = [m for m in row["messages"] if m["role"] == "assistant"]
        assert [t for feature in texts(style, row) for t in feature] == [generated(style, m) for m in turns]


def test_template_whose_context_depends_on_the_answer_is_refused() -> None:
    peeking = "{{ messages[-1].content | length }}" + STYLES["chatml"]
    with pytest.raises(DataError, match="differently with and without it"):
        texts(peeking, row_of("u", "a long answer"))


def test_one_round_templates_work() -> None:
    once = r"{%- if messages | length > 2 -%}{{ raise_exception('one question only') }}{%- endif -%}" + STYLES["chatml"]
    assert texts(once, row_of("u", "a")) == [["a<|end|>"]]
