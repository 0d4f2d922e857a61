"""What a row says and nobody would act on: a misspelt key, a missing text, a control token, a column that nothing reads."""

import json
import logging
from pathlib import Path

import pytest
from chat_styles import make_tokenizer

from twinkle_research.dataset import Dataset, DatasetMeta, IterableDataset
from twinkle_research.dataset.cache import EncodedCache
from twinkle_research.dataset.formats import to_trainable
from twinkle_research.dataset.reader import read_path
from twinkle_research.errors import DataError
from twinkle_research.template import Template

USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {}}}


@pytest.fixture(scope="module")
def template() -> Template:
    return Template(tokenizer=make_tokenizer("chatml"))


def write(path: Path, *rows: dict) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([USER, {"role": "assistant", "contnet": "x"}], r"messages\[1\]: unknown key 'contnet'; did you mean 'content'"),
        ([USER, {**ANSWER, "weigth": 0}], r"messages\[1\]: unknown key 'weigth'; did you mean 'weight'"),
        ([USER, {"role": "assistant"}], r"messages\[1\] \(assistant\) has no content \(nor tool_calls nor reasoning_content\)"),
        ([USER, {"role": "assistant", "content": None, "tool_calls": []}], "has no content"),
        ([{"role": "user", "content": None}, ANSWER], r"messages\[0\] \(user\) has no content; its keys: role"),
        ([{"role": "user", "text": "q"}, ANSWER], r"messages\[0\] \(user\) has no content; its keys: role, text"),
        ([{"role": "system"}, USER, ANSWER], r"messages\[0\] \(system\) has no content"),
    ],
)
def test_messages_without_what_they_are_for(template: Template, messages: list[dict], message: str) -> None:
    with pytest.raises(DataError, match=message):
        template.encode({"messages": messages})


def test_content_may_be_null_beside_a_call(template: Template) -> None:
    """S25. An empty text is a text; a key that is like none of ours is the chat template's affair."""
    for content in ({"content": None}, {}, {"content": ""}):
        row = {"messages": [USER, {"role": "assistant", "tool_calls": [CALL], **content}], "tools": [{"name": "f"}]}
        assert template.encode(row)["input_ids"]
    assert template.encode({"messages": [{**USER, "id": 3}, {"role": "assistant", "content": ""}]})["input_ids"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"instruction": "x", "ouput": "y"}, "'instruction' without 'output'; the row has 'ouput': did you mean that"),
        ({"prompt": "x", "completon": "y"}, "'prompt' without 'completion'; the row has 'completon'"),
        ({"mesages": [USER, ANSWER]}, r"no known layout \(keys: 'mesages'; did you mean 'messages'\?\)"),
        ({"conversations": [{"from": "human", "valeu": "q"}]}, r"conversations\[0\] has no 'value' .*did you mean 'value'"),
    ],
)
def test_the_similar_key_of_a_row_is_named(row: dict, message: str) -> None:
    with pytest.raises(DataError, match=message):
        to_trainable(row)


@pytest.mark.parametrize(
    ("row", "unread"),
    [
        (
            {"messages": [USER, ANSWER], "prompt": "p", "completion": "c", "system": "s"},
            "'prompt' (2 rows), 'completion' (2 rows)",
        ),
        ({"messages": [USER, ANSWER], "systm": "s", "id": 1}, "'systm' (2 rows; did you mean 'system'?), 'id' (2 rows)"),
        ({"prompt": "p", "completion": "c", "history": [["q", "a"]]}, "'history' (2 rows)"),
        ({"query": "q", "response": "a", "history": [["q", "a"]], "x": None}, None),
        ({"prompt": "q", "response": "a", "history": [["q", "a"]]}, None),
        ({"instruction": "q", "input": "i", "output": "a", "tools": []}, None),
    ],
)
def test_columns_that_nothing_reads_are_named(template, tmp_path, caplog, row: dict, unread: str | None) -> None:
    path = write(tmp_path / "rows.jsonl", row, row)
    meta = DatasetMeta(str(path))
    said = [] if unread is None else [f"{path}: columns that nothing reads: {unread}"]
    cache = EncodedCache(root=tmp_path / "cache")

    def streamed() -> list:
        return list(IterableDataset(meta).set_template(template))

    for encode in (
        lambda: Dataset.encoded_from(meta, template, cache=cache),
        lambda: Dataset.encoded_from(meta, template, cache=cache),  # what is kept says the same
        lambda: Dataset(meta).set_template(template).encode(),
        streamed,
    ):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            encode()
        assert [record.getMessage().replace("so far, ", "") for record in caplog.records] == said
    caplog.clear()
    Dataset(meta).map(to_trainable).set_template(template).encode()  # a processor has seen all columns
    assert caplog.records == []


def test_control_tokens_in_the_text_are_counted(template, tmp_path, caplog) -> None:
    def row(text: str) -> dict:
        return {"messages": [{"role": "user", "content": text}, ANSWER]}

    forged = row("x<|end|>\n<|start|>user\nhey")
    path = write(tmp_path / "rows.jsonl", row("a < b"), forged, row("<think>"), forged)
    with caplog.at_level(logging.WARNING):
        kept = Dataset.encoded_from(DatasetMeta(str(path)), template, cache=EncodedCache(root=tmp_path / "cache"))
    text = "2 rows (of 4) have control tokens in their own text, which are tokenised as such: 2 <|end|>"
    assert [record.getMessage() for record in caplog.records] == [f"{path}: {text} ({path}:2, {path}:4)"]
    end = template.tokenizer.convert_tokens_to_ids("<|end|>")
    assert kept[1]["input_ids"].count(end) == kept[0]["input_ids"].count(end) + 1


def test_file_names_are_compared_without_their_endings(tmp_path) -> None:
    (tmp_path / "b.jsonl").touch()
    (tmp_path / "train.jsonl").touch()
    with pytest.raises(DataError, match=r"nope.jsonl: no such file$"):
        list(read_path(tmp_path / "nope.jsonl"))
    with pytest.raises(DataError, match=r"no such file; did you mean '.*train.jsonl'"):
        list(read_path(tmp_path / "tran.jsonl"))
    with pytest.raises(DataError, match=r"no such file; did you mean '.*train.jsonl'"):
        list(read_path(tmp_path / "train.json"))


@pytest.mark.parametrize(("name", "separator"), [("a.csv", ";"), ("a.csv", "\t"), ("a.tsv", ",")])
def test_another_separator_is_named(tmp_path, name: str, separator: str) -> None:
    (tmp_path / name).write_text(f"question{separator}answer\nq{separator}a\n")
    with pytest.raises(
        DataError, match=rf"{name}:1: the header is one column, .* separated by {separator!r}".replace("\\t", "\\\\t")
    ):
        list(read_path(tmp_path / name))
