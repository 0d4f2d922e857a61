"""Template: cases S06, S07, S09, S25, tokenizers, errors."""

import json
import sys

import pytest
from chat_styles import STYLES, WORD_CHATML, chat, make_tokenizer, trained, word_tokenizer, words
from tokenizers import pre_tokenizers
from transformers import PreTrainedTokenizerFast

from twinkle_research.dataset.config import DataConfig, TrainOn, Truncation
from twinkle_research.errors import ConfigError, DataError, UserError
from twinkle_research.template import Qwen3_5Template, Template, build_template


def test_s07_template_without_markers_trains_answer_and_end_marker_only() -> None:
    tokenizer = word_tokenizer(WORD_CHATML)
    feature = Template(tokenizer=tokenizer).encode(chat("u1", "a1"))
    assert words(tokenizer, feature["input_ids"]) == "<S> user \n u1 <E> \n <S> assistant \n a1 <E> \n".split(" ")
    assert words(tokenizer, feature["labels"]) == ["IGN"] * 8 + ["a1", "<E>", "IGN", "IGN"]


def test_s06_end_token_that_is_also_the_pad_token_is_trained() -> None:
    """Labels come from where characters stand, never from comparing ids."""
    tokenizer = make_tokenizer("inst")
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    feature = Template(tokenizer=tokenizer).encode(chat("hello", "hi"))
    assert trained(feature)[-1] == tokenizer.eos_token_id


def test_s09_one_automatic_system_message_in_every_path() -> None:
    auto = r"{%- if messages[0].role != 'system' -%}{{ '<S> system \n a <E> \n ' }}{%- endif -%}" + WORD_CHATML
    tokenizer = word_tokenizer(auto)
    template = Template(tokenizer=tokenizer)
    row = chat("u1", "a1", "u2", "a2")
    feature = template.encode(row)
    assert words(tokenizer, feature["input_ids"]).count("system") == 1
    assert words(tokenizer, trained(feature)) == ["a1", "<E>", "a2", "<E>"]
    prompt = template.encode(chat("u1", "a1", "u2"), add_generation_prompt=True)["input_ids"]
    assert words(tokenizer, prompt).count("system") == 1
    assert feature["input_ids"][: len(prompt)] == prompt


def test_s09_bridge_starts_with_the_separator() -> None:
    tokenizer = word_tokenizer(WORD_CHATML)
    template = Template(tokenizer=tokenizer)
    bridge = template.bridge_ids(chat("u1", "a1", "u2"))
    assert words(tokenizer, bridge) == "\n <S> user \n u2 <E> \n <S> assistant \n".split(" ")
    sampled = template.encode(chat("u1", "a1", "u2", "a2"))["input_ids"]
    prompt = template.encode(chat("u1"), add_generation_prompt=True)["input_ids"]
    end_of_first = len(prompt) + 2
    assert sampled[end_of_first : end_of_first + len(bridge)] == bridge


def test_bridge_is_refused_where_the_template_rewrites_history() -> None:
    template = Template(tokenizer=make_tokenizer("thinking"))
    with pytest.raises(DataError, match="rewrites earlier messages"):
        template.bridge_ids(chat("u1", "<think>\nt1\n</think>\n\na1", "u2"))
    with pytest.raises(DataError, match="followed by others"):
        template.bridge_ids(chat("u1", "a1"))


@pytest.mark.parametrize("style", ["headers", "inst", "model_role"])
def test_s09_one_beginning_of_text_token(style: str) -> None:
    """The template writes it, and the tokenizer would add one of its own."""
    tokenizer = make_tokenizer(style)
    assert tokenizer("x")["input_ids"][0] == tokenizer.bos_token_id
    template = Template(tokenizer=tokenizer)
    for ids in (
        template.encode(chat("u", "a"))["input_ids"],
        template.encode(chat("u"), add_generation_prompt=True)["input_ids"],
    ):
        assert ids[0] == tokenizer.bos_token_id and ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer.bos_token_id not in template.bridge_ids(chat("u", "a", "v"))


# --- content that is not plain text ---------------------------------------------------------------------------------


def tool_row(arguments: object, content: str | None = None) -> dict:
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    return {
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": {}}}],
        "messages": [
            {"role": "user", "content": "Rain?"},
            {"role": "assistant", "content": content, "tool_calls": [call]},
            {"role": "tool", "content": "yes", "tool_call_id": "1"},
            {"role": "assistant", "content": "It rains."},
        ],
    }


@pytest.mark.parametrize("style", ["chatml", "headers", "thinking", "text_arguments", "null_content"])
def test_s25_null_content_and_both_forms_of_arguments(style: str) -> None:
    template = Template(tokenizer=make_tokenizer(style))
    as_object = template.encode_all(tool_row({"city": "Oslo", "at": {"b": 1, "a": 2}}))
    assert as_object == template.encode_all(tool_row('{"city": "Oslo", "at": {"b": 1, "a": 2}}'))
    text = template.decode(as_object[-1]["input_ids"])
    assert "None" not in text and "null" not in text and '\\"' not in text
    assert text.index('"b": 1') < text.index('"a": 2')  # the order of keys is kept
    assert any("weather" in template.decode(trained(feature)) for feature in as_object)
    for value in ("12", 12):  # text in one row, a number in the next
        assert f'"time": {json.dumps(value)}' in template.decode(template.encode_all(tool_row({"time": value}))[-1]["input_ids"])


def test_missing_content_is_empty() -> None:
    row = tool_row({})
    del row["messages"][1]["content"]
    template = Template(tokenizer=make_tokenizer("chatml"))
    assert template.encode(row)["input_ids"] == template.encode(tool_row({}, ""))["input_ids"]


def test_text_parts_are_joined_and_images_refused() -> None:
    template = Qwen3_5Template(tokenizer=make_tokenizer("chatml"))
    row = chat("hello there", "hi")
    expected = template.encode(row)
    row["messages"][0]["content"] = [{"type": "text", "text": "hello "}, {"type": "text", "text": "there"}]
    assert template.encode(row) == expected
    row["messages"][0]["content"] = [{"type": "image", "image": "x.png"}]
    with pytest.raises(DataError, match=r"messages\[0\].content\[0\] is of type 'image'"):
        template.encode(row)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m[1].update(role="asistant"), "messages\\[1\\].role is 'asistant'; did you mean 'assistant'"),
        (lambda m: m[0].update(content=5), "messages\\[0\\].content must be text, got a number"),
        (lambda m: m[1].update(tool_calls=[{"function": {"arguments": {}}}]), "tool_calls\\[0\\] needs a function 'name'"),
        (lambda m: m[1].update(tool_calls=[{"name": "f", "arguments": "{"}]), "not valid JSON"),
        (lambda m: m[1].update(tool_calls=[{"name": "f", "arguments": "[1]"}]), "must be an object"),
        (lambda m: m[0].update(tool_calls=[{"name": "f"}]), "only assistant messages have tool_calls"),
        (lambda m: m[0].update(reasoning_content="t"), "on an assistant message"),
        (lambda m: m[1].update(weight=2), "weight must be 0"),
        (lambda m: m.__setitem__(0, "text"), "messages\\[0\\] is text that is not valid JSON"),
        (lambda m: m.clear(), "'messages' is empty"),
        (lambda m: m.pop(), "no assistant message"),
        (lambda m: m[0].update(content="\ud800"), "lone surrogate"),
    ],
)
def test_bad_messages_are_named(change: object, message: str) -> None:
    row = chat("u", "a")
    change(row["messages"])
    with pytest.raises(DataError, match=message):
        Template(tokenizer=make_tokenizer("chatml")).encode(row)


def test_what_a_template_does_not_show_is_refused_by_name() -> None:
    shortened = STYLES["chatml"].replace("m.content }}", "m.content.replace('why', '...') }}").replace("<think>", "")
    assert shortened != STYLES["chatml"]
    with pytest.raises(DataError, match="the given tokenizer does not show the thinking"):
        Template(tokenizer=make_tokenizer(shortened)).encode(chat("u", "<think>why</think>a"))
    for style, what in (("inst", "tool call"), ("plain_text", "tool call")):
        row = tool_row({"city": "Oslo"})
        row.pop("tools")
        row["messages"] = row["messages"][:2]
        with pytest.raises(DataError, match=what):
            Template(tokenizer=make_tokenizer(style)).encode(row)
    with pytest.raises(DataError, match="does not show the row's tools"):
        Template(tokenizer=make_tokenizer("model_role")).encode({**chat("u", "a"), "tools": [{"name": "f"}]})
    with pytest.raises(DataError, match="System role not supported"):
        Template(tokenizer=make_tokenizer("model_role"), default_system="s").encode(chat("u", "a"))
    with pytest.raises(DataError, match="no end-of-turn marker"):
        Template(tokenizer=make_tokenizer("no_end")).encode(chat("u", "a"))
    with pytest.raises(DataError, match="does not show an assistant's content"):
        Template(tokenizer=make_tokenizer("{{ messages[0].content }}")).encode(chat("u", "a"))
    drops = STYLES["chatml"].replace("+ m.content", "+ ('' if m.tool_calls else m.content)")
    with pytest.raises(DataError, match="does not show the content"):
        Template(tokenizer=make_tokenizer(drops)).encode(tool_row({}, content="Wait."))


def test_template_without_end_marker_can_be_marked() -> None:
    marked = STYLES["no_end"].replace("m.content", "''").replace("-%}{{ '<|start|>'", "-%}{{ '<|start|>'")
    marked = marked.replace("m.role + '\\n' + ''", "m.role + '\\n'").replace(
        "{%- for c in", "{%- if m.role == 'assistant' -%}{%- generation -%}{{ m.content }}{%- endgeneration -%}"
        "{%- else -%}{{ m.content }}{%- endif -%}{%- for c in", 1,
    )  # fmt: skip
    template = Template(tokenizer=make_tokenizer(marked))
    assert template.decode(trained(template.encode(chat("u", "answer")))) == "answer"


# --- tokenizers -----------------------------------------------------------------------------------------------------


def test_answer_that_starts_with_a_line_break_does_not_merge_with_the_prompt() -> None:
    tokenizer = make_tokenizer("chatml")
    template = Template(tokenizer=tokenizer)
    assert len(tokenizer("\n\n", add_special_tokens=False)["input_ids"]) == 1  # it would merge
    feature = template.encode(chat("u", "\nhello"))
    assert template.decode(trained(feature)) == "\nhello<|end|>"
    prompt = template.encode(chat("u"), add_generation_prompt=True)["input_ids"]
    assert feature["input_ids"][: len(prompt)] == prompt


class SlowTokenizer:
    """Only what a tokenizer without offsets offers."""

    is_fast = False

    def __init__(self, fast: PreTrainedTokenizerFast, loses_spaces: bool = False):
        self._fast, self._loses_spaces = fast, loses_spaces
        self.chat_template, self.special_tokens_map = fast.chat_template, fast.special_tokens_map
        self.added_tokens_decoder = fast.added_tokens_decoder

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict:
        text = text.strip() if self._loses_spaces else text
        return {"input_ids": self._fast(text, add_special_tokens=add_special_tokens)["input_ids"]}

    def get_chat_template(self, tools: object = None) -> str:
        return self.chat_template

    def get_added_vocab(self) -> dict:
        return self._fast.get_added_vocab()

    def decode(self, ids: list[int], **options: object) -> str:
        return self._fast.decode(ids, **options)


def test_tokenizer_without_offsets() -> None:
    fast = make_tokenizer("chatml")
    row = chat("What is the capital of France?", "Paris.", "And?", " ok")
    template = Template(tokenizer=SlowTokenizer(fast))
    assert template.encode(row) == Template(tokenizer=fast).encode(row)
    with pytest.raises(DataError, match="no character offsets"):
        Template(tokenizer=SlowTokenizer(fast, loses_spaces=True)).encode(row)


def test_date_does_not_change_from_day_to_day() -> None:
    dated = "{{ '<|start|>system\\n' + strftime_now('%d %b %Y') + '<|end|>\\n' }}" + STYLES["chatml"]
    template = Template(tokenizer=make_tokenizer(dated))
    assert "01 Jan 2025" in template.decode(template.encode(chat("u", "a"))["input_ids"])


def test_settings_are_checked() -> None:
    tokenizer = make_tokenizer("chatml")
    with pytest.raises(ConfigError, match="truncation_strategy='rigth': did you mean 'right'"):
        Template(tokenizer=tokenizer, truncation_strategy="rigth")
    with pytest.raises(ConfigError, match="train_on='assistent': did you mean 'assistant'"):
        Template(tokenizer=tokenizer, train_on="assistent")
    with pytest.raises(ConfigError, match="max_length must be >= 2"):
        Template(tokenizer=tokenizer, max_length=1)
    with pytest.raises(ValueError, match="either model_id or tokenizer"):
        Template()


def test_tokenizer_is_found_by_folder(tmp_path) -> None:
    make_tokenizer("chatml").save_pretrained(tmp_path / "model")
    row = chat("u", "a")
    assert Template(tmp_path / "model").encode(row) == Template(tokenizer=make_tokenizer("chatml")).encode(row)
    with pytest.raises(UserError, match="model folder not found"):
        Template(tmp_path / "modle")
    with pytest.raises(UserError, match="ModelScope"):
        Template("ms://Qwen/Qwen3.5-4B")
    lossy = make_tokenizer("chatml")
    parts = [pre_tokenizers.Whitespace(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    lossy.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    lossy.save_pretrained(tmp_path / "lossy")
    with pytest.raises(UserError, match="loses the spaces"):
        Template(tmp_path / "lossy")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no usable tokenizer"):
        Template(tmp_path / "empty")


def test_built_from_config(tmp_path, monkeypatch) -> None:
    config = DataConfig(name="jsonl", max_length=12, truncation=Truncation.left, train_on=TrainOn.last, default_system="s")
    template = build_template(config, tokenizer=make_tokenizer("thinking"))
    assert (template.max_length, template.truncation_strategy, template.train_on) == (12, "left", "last")
    assert template.default_system == "s" and template.enable_thinking
    config.template = "Qwen3_5Template"
    assert type(build_template(config, tokenizer=make_tokenizer("thinking"))) is Qwen3_5Template
    config.template = "Templat"
    with pytest.raises(ConfigError, match="data.template='Templat'.*did you mean 'Template'"):
        build_template(config, tokenizer=make_tokenizer("thinking"))
    (tmp_path / "own_template.py").write_text("from twinkle_research.template import Template\nclass Own(Template): ...\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    config.template = "own_template.Own"
    assert type(build_template(config, tokenizer=make_tokenizer("thinking"))).__name__ == "Own"
    mistakes = {"own_template.Onw": "has no 'Onw'; did you mean 'Own'", "no_such_module.X": "no module 'no_such_module'"}
    for name, message in mistakes.items():
        config.template = name
        with pytest.raises(ConfigError, match=message):
            build_template(config, tokenizer=make_tokenizer("thinking"))


def test_sampled_tokens_are_appended_as_they_are() -> None:
    template = Template(tokenizer=make_tokenizer("chatml"))
    prompt = template.encode(chat("u"), add_generation_prompt=True)
    prompt["row"] = "here"
    feature = template.concat_input_feature(prompt, [65, 66, 67])
    assert feature["input_ids"] == [*prompt["input_ids"], 65, 66, 67]
    assert trained(feature) == [65, 66, 67] and feature["row"] == "here"
    more = template.concat_input_feature(feature, [68])
    assert trained(more) == [65, 66, 67, 68]
    assert more["length"] == len(more["attention_mask"]) == len(more["position_ids"]) == len(more["input_ids"])
    assert template.decode(more["input_ids"]).endswith(template.decode([65, 66, 67, 68]))
