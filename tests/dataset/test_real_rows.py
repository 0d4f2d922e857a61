"""Data sets that people really train on. They are not part of this project: where $TWINKLE_DATA names a folder that holds them
they are read from there, else rows made in the very same layouts stand in."""

import json
import os
from pathlib import Path

import pytest
from chat_styles import make_tokenizer

from twinkle_research.data_format import IGNORE_INDEX
from twinkle_research.dataset import Dataset, DatasetMeta
from twinkle_research.template import Template


def questions() -> str:
    rows = [
        {"question": f"How much is {i} + 72?", "answer": f"{i}+72 = <<{i}+72={i + 72}>>{i + 72}\n#### {i + 72}"}
        for i in range(510)
    ]
    return "".join(json.dumps(row) + "\n" for row in rows)


def identity_lines() -> str:
    rows = [{"query": f"你是谁{i}", "response": "我是{{NAME}}，由{{AUTHOR}}创建。", "tag": "zh"} for i in range(20)]
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def identity_list() -> str:
    rows = [{"instruction": f"hi {i}", "input": "", "output": "I am {{name}}, by {{author}}."} for i in range(20)]
    return json.dumps(rows, indent=2)


def tool_calls() -> str:
    """Every third conversation calls a tool, once or twice; tools are JSON text."""
    tools = [{"name": "find", "description": "d", "parameters": {"type": "object", "properties": {"what": {"type": "array"}}}}]
    rows = []
    for i in range(160):
        turns = [("human", f"Find {i}."), ("gpt", "What exactly?"), ("human", "All of it.")]
        for k in range(i % 3 and i % 2 + 1):
            call = {"name": "find", "arguments": {"what": [f"it {k}", i], "deep": {"x": None}}}
            turns += [("function_call", json.dumps(call)), ("observation", json.dumps({"found": [i, "é"]}))]
        turns.append(("gpt", f"Found {i}."))
        conversations = [{"from": who, "value": text} for who, text in turns]
        rows.append({"conversations": conversations, "tools": json.dumps(tools if i % 3 else [])})
    return json.dumps(rows)


MADE = {
    "gsm8k/train.jsonl": questions,
    "swift/self_cognition.jsonl": identity_lines,
    "llamafactory/identity.json": identity_list,
    "llamafactory/glaive_toolcall_en_demo.json": tool_calls,
}


@pytest.fixture
def source(tmp_path: Path):
    def find(name: str) -> str:
        folder = os.environ.get("TWINKLE_DATA")
        if folder and (Path(folder) / name).exists():
            return str(Path(folder) / name)
        path = tmp_path / Path(name).name
        path.write_text(MADE[name](), encoding="utf-8")
        return str(path)

    return find


def encode(path: str, *, processor: str | None = None, style: str = "chatml", limit: int | None = None) -> Dataset:
    rows = Dataset(DatasetMeta(path, data_slice=None if limit is None else range(limit)))
    if processor:
        rows.map(processor)
    return rows.set_template(Template(tokenizer=make_tokenizer(style), max_length=None)).encode()


def trained_text(rows: Dataset, index: int) -> str:
    return "|".join(text for text, trained in rows.template.trained_spans(rows[index]) if trained)


def test_questions_and_answers(source) -> None:
    rows = encode(source("gsm8k/train.jsonl"), limit=500)
    assert len(rows) == 500 and not rows.dropped
    assert trained_text(rows, 0).endswith("#### 72<|end|>")
    assert rows[499]["row"].endswith("train.jsonl:500")


def test_identity_rows_of_others(source) -> None:
    for name in ("swift/self_cognition.jsonl", "llamafactory/identity.json"):
        rows = encode(source(name), processor="SelfCognitionProcessor")
        text = " ".join(trained_text(rows, i) for i in range(len(rows)))
        assert "Tansy" in text and "{{" not in text


@pytest.mark.parametrize("style", ["chatml", "headers", "thinking"])
def test_conversations_with_tools(source, style: str) -> None:
    path = source("llamafactory/glaive_toolcall_en_demo.json")
    rows = encode(path, style=style, limit=150)
    assert not rows.dropped
    calls = sum(trained_text(rows, i).count('{"name": ') for i in range(len(rows)))
    raw = Dataset(DatasetMeta(path, data_slice=range(150)))
    assert calls == sum(m["from"] == "function_call" for row in raw for m in row["conversations"]) > 50
    assert all(any(label != IGNORE_INDEX for label in feature["labels"]) for feature in rows)
