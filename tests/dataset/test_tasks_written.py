"""Tasks that somebody has written down: GSM8K, MATH, rows with a prompt and an answer; and PromptDataset."""

import json
import logging
import os
from pathlib import Path

import pytest
from chat_styles import make_tokenizer

from twinkle_research.config import compose, to_object
from twinkle_research.dataset import PromptDataset, build_datasets, build_prompts
from twinkle_research.dataset.config import (
    CommonDataConfig,
    Gsm8kDataConfig,
    MathDataConfig,
    OnError,
    PromptsDataConfig,
    SumsDataConfig,
    Truncation,
)
from twinkle_research.dataset.order import keyed_permutation
from twinkle_research.dataset.preview import preview
from twinkle_research.dataset.tasks.written import Gsm8kRows, MathRows, PromptRows, last_boxed
from twinkle_research.errors import ConfigError, DataError
from twinkle_research.reward import GSM8KAccuracyReward
from twinkle_research.template import Template, build_template

TOKENIZER = make_tokenizer("chatml")


def template(config: CommonDataConfig) -> Template:
    return build_template(config, tokenizer=TOKENIZER)


def write(path: Path, rows: list[object]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def config(path: str, kind: type = PromptsDataConfig, **options: object) -> CommonDataConfig:
    named = {} if kind is PromptsDataConfig else {"prompt": "{question}\nThink."}
    return kind(name="x", path=path, **named, **options)


def built(data: CommonDataConfig, seed: int = 0) -> tuple[PromptDataset, PromptDataset | None]:
    return build_prompts(data, template(data), seed)


ROWS = [{"prompt": f"question {i}", "answer": f"answer {i}", "level": i % 3} for i in range(20)]


# --- what becomes of a row ------------------------------------------------------------------------------------------


def test_gsm8k_row() -> None:
    row = {"question": "How {many}?", "answer": "9 + 1 = <<9+1=10>>10\n#### 1,010", "id": 5}
    made = Gsm8kRows("Q: {question}")(row)
    assert made == {"id": 5, "prompt": "Q: How {many}?", "answer": "1010", "completion": row["answer"]}
    for bad, reason in [
        ({"question": "a", "answer": "10"}, "'answer' must end in '#### ' and the result"),
        ({"question": "a", "answer": "10 ####"}, "'answer' must end in"),
        ({"qestion": "a", "answer": "#### 1"}, "'question' is missing; did you mean 'qestion'"),
        ({"question": 3, "answer": "#### 1"}, "'question' must be text, got int"),
    ]:
        with pytest.raises(DataError, match=reason):
            Gsm8kRows("{question}")(bad)


@pytest.mark.parametrize(
    ("text", "result"),
    [
        (r"so \boxed{72}.", "72"),
        (r"\boxed{1}, no, \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"$\boxed{ \{1, 2\} }$", r"\{1, 2\}"),
        (r"\fbox{x}", "x"),
        (r"$\boxed 5$.", "5"),
        (r"\boxed{never closed", None),
        (r"\boxed", None),
        ("none", None),
    ],
)
def test_last_boxed(text: str, result: str | None) -> None:
    assert last_boxed(text) == result


def test_math_row() -> None:
    row = {"problem": "What?", "solution": r"It is $\boxed{\frac12}$.", "level": "Level 5"}
    made = MathRows("{question} Box it.")(row)
    assert made["prompt"] == "What? Box it." and made["answer"] == r"\frac12" and made["completion"] == row["solution"]
    assert made["level"] == "Level 5" and made["solution"] == row["solution"]
    assert MathRows("{question}")({**row, "answer": "0.5"})["answer"] == "0.5"
    with pytest.raises(DataError, match="no result in"):
        MathRows("{question}")({"problem": "What?", "solution": "It is 5."})


def test_prompt_row() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert PromptRows()({"prompt": "a", "answer": 7, "n": 1}) == {"prompt": "a", "answer": 7, "n": 1, "completion": "7"}
    assert PromptRows("q", "a")({"q": "x", "a": "y"}) == {"prompt": "x", "answer": "y", "completion": "y"}
    assert PromptRows()({"prompt": "a", "answer": "b", "completion": "since: b"})["completion"] == "since: b"
    assert PromptRows()({"messages": messages, "answer": "b"})["prompt"] == messages
    assert PromptRows(answer_key=None)({"prompt": "a", "note": 1}) == {"prompt": "a", "note": 1}
    assert "completion" not in PromptRows()({"prompt": "a", "answer": ["b", "c"]})
    for bad, reason in [
        ({"promt": "a", "answer": "b"}, "no prompt in column 'prompt' .*; did you mean 'promt'"),
        ({"prompt": "a", "anwser": "b"}, "no answer in column 'answer' .*; did you mean 'anwser'.*data.answer_key=null"),
        ({"prompt": 5, "answer": "b"}, "'prompt' must be text or a list of messages, got int"),
        ({"prompt": [], "answer": "b"}, "must be text or a list"),
        ({"messages": [*messages, {"role": "assistant", "content": "x"}], "answer": "b"}, "ends with an assistant turn"),
    ]:
        with pytest.raises(DataError, match=reason):
            PromptRows()(bad)


# --- prompts --------------------------------------------------------------------------------------------------------


def test_rows_and_tokens(tmp_path: Path) -> None:
    train, held = built(config(write(tmp_path / "rows.jsonl", ROWS)))
    assert len(train) == 20 and held is None
    assert train.row(3) == {"messages": [{"role": "user", "content": "question 3"}], "answer": "answer 3", "level": 0}
    assert train.origin(3) == f"{tmp_path}/rows.jsonl:4"
    assert train.trajectory(3) == {
        "messages": [{"role": "user", "content": "question 3"}],
        "user_data": [["level", 0], ["answer", "answer 3"]],
        "row": f"{tmp_path}/rows.jsonl:4",
    }
    expected = Template(tokenizer=TOKENIZER).encode({"messages": train.row(3)["messages"]}, add_generation_prompt=True)
    assert train.prompt_ids(3) == expected["input_ids"] == train[3]["input_ids"] == train[-17]["input_ids"]
    assert TOKENIZER.decode(train.prompt_ids(3)).endswith("question 3<|end|>\n<|start|>assistant\n")
    assert train.lengths(train.epoch_order(0, False, 0)).tolist() == [len(train.prompt_ids(i)) for i in range(20)]
    with pytest.raises(IndexError):
        train[20]


def test_messages_tools_system_and_history(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    history = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}, {"role": "user", "content": "3"}]
    rows = [
        {"messages": history, "answer": "4", "tools": tools, "completion": "it is 4"},
        {"prompt": "5", "system": "Be brief.", "answer": "6"},
    ]
    train, _ = built(config(write(tmp_path / "rows.jsonl", rows)))
    first, second = train.row(0), train.row(1)
    assert [m["content"] for m in first["messages"]] == ["1", "2", "3"] and first["tools"] == tools
    assert "it is 4" not in TOKENIZER.decode(train.prompt_ids(0)) and '"add"' in TOKENIZER.decode(train.prompt_ids(0))
    assert train.trajectory(0)["tools"] == tools and train.trajectory(0)["user_data"] == [["answer", "4"]]
    assert [m["role"] for m in second["messages"]] == ["system", "user"] and "system" not in second


def test_a_base_model_gets_the_text_itself(tmp_path: Path) -> None:
    base = make_tokenizer("chatml")
    base.chat_template = None
    train, _ = build_prompts(config(write(tmp_path / "rows.jsonl", ROWS)), Template(tokenizer=base), 0)
    assert base.decode(train.prompt_ids(0)).removeprefix("<bos>") == "question 0"
    assert train.row(0)["messages"] == [{"role": "user", "content": "question 0"}]


def test_too_long_prompts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [*ROWS[:3], {"prompt": "very " * 50 + "long", "answer": "x"}, *ROWS[3:5]]
    path = write(tmp_path / "rows.jsonl", rows)
    with pytest.raises(DataError, match=r"rows.jsonl:4: \d+ tokens exceed max_length=40"):
        built(config(path, max_length=40))
    with pytest.raises(DataError, match=r"rows.jsonl:4: .* would cut off the generation prompt"):
        built(config(path, max_length=40, truncation=Truncation.right))
    with caplog.at_level(logging.WARNING):
        train, _ = built(config(path, max_length=40, truncation=Truncation.delete))
    assert len(train) == 5 and [train.row(i)["answer"] for i in range(5)] == [f"answer {i}" for i in range(5)]
    assert [str(d.row) for d in train.dropped] == [f"{path}:4"]
    assert "encoding prompts dropped 1 rows (of 6): 1 longer than max_length=40" in caplog.text
    train, _ = built(config(path, max_length=40, truncation=Truncation.left))
    assert len(train) == 6 and len(train.prompt_ids(3)) == 40
    with pytest.raises(DataError, match="none of 6 prompts can be used: 6 longer than max_length=4"):
        built(config(path, max_length=4, truncation=Truncation.delete))


def test_bad_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "answer": "b"}\n\n{"prompt": "c"}\n{"prompt": "d", "answer": "e"}\nnot json\n')
    with pytest.raises(DataError, match=r"rows.jsonl:3: no answer in column 'answer'"):
        built(config(str(path)))
    with caplog.at_level(logging.WARNING):
        train, _ = built(config(str(path), on_error=OnError.skip))
    assert len(train) == 2 and "rows.jsonl:3" in caplog.text and "rows.jsonl:5" in caplog.text
    with pytest.raises(DataError, match="no rows: .*no answer in column"):
        built(config(write(tmp_path / "bad.jsonl", [{"prompt": "a"}]), on_error=OnError.skip))
    empty = write(tmp_path / "empty.jsonl", [{"prompt": "a", "answer": "b"}, {"prompt": " ", "answer": "c"}])
    with pytest.raises(DataError, match="empty.jsonl:2: the prompt is empty"):
        built(config(empty))
    assert len(built(config(empty, on_error=OnError.skip))[0]) == 1


def test_a_processor_of_the_users_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shaping_rows.py").write_text("def shape(row):\n    return {'prompt': row['text'], 'answer': 1}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    train, _ = built(config(write(tmp_path / "rows.jsonl", [{"text": "a"}]), processor="shaping_rows.shape"))
    assert train.row(0)["answer"] == 1


# --- splits, order, resume ------------------------------------------------------------------------------------------


def test_held_out_rows_are_those_of_supervised_runs(tmp_path: Path) -> None:
    data = config(write(tmp_path / "rows.jsonl", ROWS), eval_rows=6, cache_dir=str(tmp_path / "cache"))
    train, held = built(data, seed=3)
    everything = [part.row(i)["answer"] for part in (train, held) for i in range(len(part))]
    assert len(train) == 14 and len(held) == 6 and len(set(everything)) == 20
    supervised, supervised_held = build_datasets(data, template(data), 3)
    assert [held.origin(i) for i in range(6)] == supervised_held.origins
    assert [train.origin(i) for i in range(14)] == supervised.origins
    assert [built(data, seed=4)[1].origin(i) for i in range(6)] != supervised_held.origins
    with pytest.raises(DataError, match="data.eval_rows=20 leaves none of the 20 rows"):
        built(config(data.path, eval_rows=20))


def test_held_out_rows_of_a_file(tmp_path: Path) -> None:
    train, test = (write(tmp_path / name, ROWS[part]) for name, part in (("a.jsonl", slice(0, 12)), ("b.jsonl", slice(12, 20))))
    found, held = built(config(train, eval_path=test, limit=10))
    assert len(found) == 10 and [held.row(i)["answer"] for i in range(8)] == [f"answer {i}" for i in range(12, 20)]
    with pytest.raises(ConfigError, match="data.eval_rows has no effect"):
        built(config(train, eval_path=test, eval_rows=1))


def test_order_is_that_of_the_loader_and_goes_on_from_any_position(tmp_path: Path) -> None:
    train, _ = built(config(write(tmp_path / "rows.jsonl", ROWS)), seed=5)
    three = [int(i) for epoch in range(3) for i in keyed_permutation(20, 5, "data_order", epoch)]
    assert train.take(0, 60) == three
    for start in (0, 7, 19, 20, 33):
        assert train.take(start, 23) == three[start : start + 23]
    assert sorted(train.take(40, 20)) == list(range(20))
    in_order, _ = built(config(write(tmp_path / "rows.jsonl", ROWS), shuffle=False))
    assert in_order.take(18, 4) == [18, 19, 0, 1]


def test_fingerprint(tmp_path: Path) -> None:
    def fingerprint(rows: list[dict], **options: object) -> str:
        return built(config(write(tmp_path / "rows.jsonl", rows), **options))[0].fingerprint

    same = fingerprint(ROWS)
    assert same == fingerprint(ROWS) == fingerprint(ROWS, num_proc=2, shuffle=False)
    others = [
        fingerprint([*ROWS[:-1], {**ROWS[-1], "answer": "changed"}]),
        fingerprint([*ROWS[:-1], {**ROWS[-1], "prompt": "changed"}]),
        fingerprint([*ROWS[:-1], {**ROWS[-1], "level": 9}]),
        fingerprint(ROWS[::-1]),
        fingerprint(ROWS, default_system="Be brief."),
    ]
    assert len({same, *others}) == 6


def test_preview_shows_prompts(tmp_path: Path) -> None:
    data = config(write(tmp_path / "rows.jsonl", ROWS))
    text = preview(built(data)[0], template(data), 1).plain
    assert "rows.jsonl:1: " in text and "0 trained" in text and "question 0" in text


# --- the same option in supervised runs -----------------------------------------------------------------------------


def trained_text(data: CommonDataConfig) -> list[tuple[str, str]]:
    """(prompt, trained text) of the training rows."""
    made = template(data)
    dataset, _ = build_datasets(data, made, 0)
    spans = [made.trained_spans(dataset[i]) for i in range(len(dataset))]
    return [("".join(t for t, on in row if not on), "".join(t for t, on in row if on)) for row in spans]


def test_supervised_runs_train_the_right_completion(tmp_path: Path) -> None:
    cache = {"cache_dir": str(tmp_path / "cache")}
    sums = SumsDataConfig(name="sums", rows=5, zero_padded=True, reversed=True, **cache)
    for prompt, completion in trained_text(sums):
        a, b = (int(n) for n in prompt.partition("user\n")[2].partition("=")[0].split("+"))
        assert completion.removesuffix("<|end|>") == f"{a + b:03d}"[::-1]
    gsm8k = config(write(tmp_path / "g.jsonl", [{"question": "How?", "answer": "So.\n#### 5"}]), Gsm8kDataConfig, **cache)
    assert trained_text(gsm8k)[0][1] == "So.\n#### 5<|end|>" and "How?\nThink." in trained_text(gsm8k)[0][0]
    math = config(write(tmp_path / "m.jsonl", [{"problem": "How?", "solution": r"\boxed{5}"}]), MathDataConfig, **cache)
    assert trained_text(math)[0][1] == r"\boxed{5}<|end|>"
    rows = [{"prompt": "a", "answer": 5}, {"messages": [{"role": "user", "content": "b"}], "answer": "6"}]
    prompts = config(write(tmp_path / "p.jsonl", rows), **cache)
    assert [text for _, text in trained_text(prompts)] == ["5<|end|>", "6<|end|>"]
    assert built(gsm8k)[0].row(0)["answer"] == built(math)[0].row(0)["answer"] == "5"


def test_encoded_rows_of_tasks_are_kept(tmp_path: Path) -> None:
    data = SumsDataConfig(name="sums", rows=30, eval_rows=4, cache_dir=str(tmp_path))
    first, held = build_datasets(data, template(data), 0)
    again, _ = build_datasets(data, template(data), 7)
    assert len(list(tmp_path.glob("*/header.json"))) == 2 and len(held) == 4
    assert first.fingerprint == again.fingerprint  # the run's seed decides the order only
    assert first.origins[:2] == ["sums/train[0]", "sums/train[1]"]


def gsm8k_files(folder: Path) -> tuple[str, str]:
    """The real ones where they are at hand, else some of the same form."""
    real = Path(os.environ.get("TWINKLE_DATA", folder)) / "gsm8k"
    if real.is_dir():
        return str(real / "train.jsonl"), str(real / "test.jsonl")
    made = [{"question": f"What is {i} * 250?", "answer": f"{i} * 250 = <<...>>\n#### {i * 250:,}"} for i in range(900)]
    return write(folder / "train.jsonl", made), write(folder / "test.jsonl", made[:50])


def test_gsm8k_from_files(tmp_path: Path) -> None:
    train_path, test_path = gsm8k_files(tmp_path)
    words = ["data=gsm8k", f"data.path={train_path}", f"data.eval_path={test_path}", "data.limit=800"]
    data = to_object(compose(words)).data
    train, held = built(data)
    assert (len(train), len(held)) == (800, len(Path(test_path).read_text().splitlines()))
    rows = [{**part.trajectory(i), "completion": part.row(i)["answer"]} for part in (train, held) for i in range(len(part))]
    assert all(row["completion"].lstrip("-").replace(".", "").isdigit() for row in rows)
    marked = [{**row, "completion": f"So #### {row['completion']}"} for row in rows]
    assert set(GSM8KAccuracyReward()(marked)) == {1.0} and set(GSM8KAccuracyReward()(rows)) == {0.0}
