"""Layouts of rows."""

import json

import pytest

from twinkle_research.dataset.formats import to_trainable
from twinkle_research.errors import DataError

USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
SYSTEM = {"role": "system", "content": "s"}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": [USER, ANSWER]}, {"messages": [USER, ANSWER]}),
        ({"messages": json.dumps([USER, ANSWER])}, {"messages": [USER, ANSWER]}),
        ({"messages": [USER, ANSWER], "system": "s", "id": 1}, {"messages": [SYSTEM, USER, ANSWER]}),
        ({"messages": [SYSTEM, USER, ANSWER], "system": ""}, {"messages": [SYSTEM, USER, ANSWER]}),
        ({"conversations": [USER, ANSWER], "tools": []}, {"messages": [USER, ANSWER]}),
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, {"messages": [USER, ANSWER]}),
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "system": "s", "tools": "[]"},
            {"messages": [SYSTEM, USER, ANSWER], "tools": "[]"},
        ),
        ({"prompt": "q", "completion": "a"}, {"prompt": "q", "completion": "a"}),
        ({"prompt": "q", "completion": "a", "system": None, "tools": "[]"}, {"prompt": "q", "completion": "a"}),
        ({"prompt": "q", "completion": "a", "system": "s"}, {"messages": [SYSTEM, USER, ANSWER]}),
        (
            {"prompt": "q", "completion": "a", "tools": [{"name": "weather"}]},
            {"messages": [USER, ANSWER], "tools": [{"name": "weather"}]},
        ),
        ({"prompt": [USER], "completion": [ANSWER]}, {"messages": [USER, ANSWER]}),
        ({"prompt": [USER, ANSWER, USER], "completion": "a"}, {"messages": [USER, {**ANSWER, "weight": 0}, USER, ANSWER]}),
        ({"instruction": "q", "input": "", "output": "a"}, {"messages": [USER, ANSWER]}),
        ({"instruction": "x", "input": "y", "output": "a"}, {"messages": [{"role": "user", "content": "x\n\ny"}, ANSWER]}),
        ({"instruction": "q", "output": "a", "system": "s"}, {"messages": [SYSTEM, USER, ANSWER]}),
        ({"query": "q", "response": "a", "history": [["q", "a"]]}, {"messages": [USER, ANSWER, USER, ANSWER]}),
        ({"question": "q", "answer": "a"}, {"messages": [USER, ANSWER]}),
        ({"prompt": "q", "response": "a"}, {"messages": [USER, ANSWER]}),
    ],
)
def test_layouts(row: dict, expected: dict) -> None:
    assert to_trainable(row) == expected


def test_sharegpt_tools() -> None:
    value = {"name": "weather", "arguments": {"city": "Oslo"}}
    call = {"type": "function", "function": value}
    for raw in (json.dumps(value), value, [value], json.dumps([value]), json.dumps({**value, "arguments": '{"city": "Oslo"}'})):
        row = {
            "conversations": [
                {"from": "human", "value": "q"},
                {"from": "function_call", "value": raw},
                {"from": "observation", "value": "rain"},
                {"from": "gpt", "value": "a"},
            ],
            "tools": json.dumps([{"name": "weather"}]),
        }
        messages = to_trainable(row)["messages"]
        assert messages[1] == {"role": "assistant", "content": "", "tool_calls": [call]}
        assert messages[2] == {"role": "tool", "content": "rain"}


@pytest.mark.parametrize("row", [{"prompt": "q"}, {"prompt": [USER]}, {"instruction": "q"}, {"query": "q"}, {"messages": [USER]}])
def test_prompts_need_no_answer(row: dict) -> None:
    assert to_trainable(row, prompt_only=True) in ({"prompt": "q"}, {"messages": [USER]})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "x"}, "'prompt' without 'completion'"),
        ({"query": "x"}, "'query' without 'response'"),
        ({"instruction": "x", "input": "y"}, "'instruction' without 'output'"),
        ({"messages": []}, "'messages' is empty"),
        ({"messages": "hello"}, "messages is text that is not valid JSON"),
        ({"messages": {"role": "user"}}, "messages must be a list, got an object"),
        ({"text": "x", "n": 1}, "no known layout \\(keys: 'text', 'n'\\). Known: messages; .*data.processor"),
        ({}, "keys: none"),
        ({"conversations": [{"from": "humn", "value": "q"}]}, "conversations\\[0\\].from is 'humn'; did you mean 'human'"),
        ({"conversations": [{"from": "function_call", "value": "f()"}]}, "value is text that is not valid JSON"),
        ({"question": "q", "answer": 4}, "'answer' must be text, got int"),
        ({"query": "q", "response": "a", "history": [["q"]]}, "history\\[0\\] must be a pair"),
        ({"query": "q", "response": "a", "history": 5}, "history must be a list, got a number"),
        ({"query": "q", "response": "a", "history": {"q": "a"}}, "history must be a list, got an object"),
        ({"conversations": [{"from": ["human"], "value": "q"}]}, "conversations\\[0\\].from must be text, got list"),
        (
            {"messages": "[" + "1" * 5000 + "]"},
            "messages is text that cannot be read as JSON: a number has more than 4300 digits",
        ),
        ({"messages": "[" * 100_000}, "messages is text that cannot be read as JSON: JSON is nested too deeply"),
        ({"messages": [SYSTEM, USER, ANSWER], "system": "other"}, "'system' beside a system message"),
        ({"prompt": "q", "completion": "a", "system": 3}, "'system' must be text, got int"),
        ({"prompt": "q", "completion": "a", "tools": 3}, "tools must be a list, got a number"),
        ({"prompt": "x", "completion": None}, "^'completion' is null"),
        ({"prompt": None, "completion": "x"}, "no known layout \\(keys: 'prompt' \\(null\\), 'completion'\\)"),
        ({"prompt": "x", "chosen": "a", "rejected": "b"}, "is a preference: train on it with data=preference and loss=dpo"),
        ({"chosen": [USER, ANSWER], "rejected": [USER, ANSWER]}, "is a preference"),
        ({"instruction": "x", "input": 0, "output": "a"}, "'input' must be text, got int"),
        ("text", "a row must be an object with keys, got str"),
    ],
)
def test_bad_rows(row: dict, message: str) -> None:
    with pytest.raises(DataError, match=message):
        to_trainable(row)
