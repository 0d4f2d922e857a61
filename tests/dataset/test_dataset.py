"""Dataset: from sources to features."""

import json
import logging
import os
from pathlib import Path

import pytest
from chat_styles import make_tokenizer
from rich.console import Console

from twinkle_research.dataset import Dataset, DatasetMeta, build_datasets
from twinkle_research.dataset.config import DataConfig, OnError, Truncation
from twinkle_research.dataset.preprocessor import Preprocessor, SelfCognitionProcessor
from twinkle_research.dataset.preview import preview
from twinkle_research.dataset.rows import raise_bad_row
from twinkle_research.dataset.sources import HubSource
from twinkle_research.errors import ConfigError, DataError, UserError
from twinkle_research.template import Template, build_template


def chat(question: str, answer: str) -> dict:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


ROWS = [chat(f"question {i}", f"answer {i}") for i in range(20)]


def template(**options: object) -> Template:
    return Template(tokenizer=make_tokenizer("chatml"), **options)


def data(rows: list[dict] = ROWS, **options: object) -> Dataset:
    return Dataset(DatasetMeta(data=rows), **options).set_template(template())


def write(path: Path, rows: list[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# --- sources --------------------------------------------------------------------------------------------------------


def test_source_must_be_given() -> None:
    with pytest.raises(ValueError, match="dataset_id or data"):
        DatasetMeta()
    with pytest.raises(ValueError, match="data_slice must be an iterable"):
        DatasetMeta("rows.jsonl", data_slice=5)
    with pytest.raises(ValueError, match="data_slice must be an iterable of row numbers"):
        DatasetMeta("rows.jsonl", data_slice=[0, 1.5])


def test_slices(tmp_path) -> None:
    path = write(tmp_path / "rows.jsonl", [{"n": i} for i in range(6)])

    def numbers(part: object) -> list[int]:
        return [row["n"] for row in Dataset(DatasetMeta(str(path), data_slice=part))]

    assert numbers(range(3)) == [0, 1, 2]
    assert numbers(range(1, 100, 2)) == [1, 3, 5]
    assert numbers([4, 0, -1]) == [4, 0, 5]
    with pytest.raises(DataError, match="data_slice names row 6, but there are 6 rows"):
        numbers([1, 6])
    with pytest.raises(DataError, match="no rows after reading"):
        numbers(range(10, 20))


def test_slice_of_the_start_reads_no_further(tmp_path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"n": 0}\n{"n": 1}\nbroken\n')
    assert len(Dataset(DatasetMeta(str(path), data_slice=range(2)))) == 2


def test_unreachable_sources_are_named(tmp_path) -> None:
    with pytest.raises(UserError, match=r"ModelScope .* package modelscope: pip install 'twinkle_research\[modelscope\]'"):
        Dataset(DatasetMeta("ms://swift/self-cognition"))
    with pytest.raises(DataError, match="no such built-in data; did you mean 'identity'"):
        Dataset(DatasetMeta("builtin://idenity"))
    with pytest.raises(DataError, match="no such file"):
        Dataset(DatasetMeta("missing.jsonl"))
    with pytest.raises(DataError, match="someone/some-rows: cannot be loaded"):
        Dataset(DatasetMeta("hf://someone/some-rows"))


def test_hub_loader_reads_a_folder(tmp_path) -> None:
    """The hub path itself, on a local folder, which the datasets library takes for a data set."""
    (tmp_path / "rows").mkdir()
    write(tmp_path / "rows" / "train.jsonl", ROWS[:2])
    meta = DatasetMeta(str(tmp_path / "rows"))
    for streaming in (False, True):
        source = HubSource(meta, meta.dataset_id, streaming)
        found = list(source.rows(raise_bad_row))
        assert [row for _, row in found] == ROWS[:2]
        assert [str(origin) for origin, _ in found] == [f"{tmp_path}/rows/train[{i}]" for i in range(2)]
        # What is fetched while it is read has no content that could be known before.
        assert (source.digest() is None) == streaming


# --- rows -----------------------------------------------------------------------------------------------------------


class Doubling(Preprocessor):
    def __init__(self, suffix: str = ""):
        self.suffix = suffix

    def preprocess(self, row: dict) -> list[dict]:
        return [row, chat("again" + self.suffix, "answer")]


def test_map_takes_functions_classes_names_and_paths(tmp_path, monkeypatch) -> None:
    assert len(data().map(Doubling, init_args={"suffix": "!"})) == 40
    assert data([{"a": "{{NAME}}, {{author}}"}]).map("SelfCognitionProcessor", init_args={"model_name": "N"})[0] == {
        "a": "N, the Twinkle Research team"
    }
    kept = data().map(lambda row: row if "1" in row["messages"][0]["content"] else None)
    assert len(kept) == 11 and kept.dropped[0].row == "data[0]" and len(kept.dropped) == 9
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["", *os.sys.path])
    (tmp_path / "own_rows.py").write_text("def convert(row):\n    return {'prompt': row['q'], 'completion': row['a']}\n")
    assert data([{"q": "x", "a": "y"}]).map("own_rows.convert")[0] == {"prompt": "x", "completion": "y"}


def test_mistakes_in_processors_are_named() -> None:
    with pytest.raises(ConfigError, match="did you mean 'SelfCognitionProcessor'"):
        data().map("SelfCognitionProcesor")
    with pytest.raises(ConfigError, match="has no option 'nme'"):
        data().map("SelfCognitionProcessor", init_args={"nme": "x"})
    with pytest.raises(ConfigError, match="have no effect"):
        data().map(len, init_args={"a": 1})
    with pytest.raises(DataError, match=r"data\[0\]: .* failed: KeyError: 'text'"):
        data().map(lambda row: row["text"])
    with pytest.raises(DataError, match=r"data\[0\]: .* returned str; expected a row"):
        data().map(lambda row: "text")
    with pytest.raises(ValueError, match="names another data set"):
        data().map(len, dataset_meta=DatasetMeta("other.jsonl"))
    with pytest.raises(DataError, match="no rows after"):
        data().map(lambda row: None)
    skipping = data([{"text": "x"}, {}], on_error="skip").map(lambda row: {"prompt": row["text"], "completion": ""})
    assert [(d.row, d.reason.split(" failed: ")[1]) for d in skipping.dropped] == [("data[1]", "KeyError: 'text'")]


def test_filter_and_shuffle() -> None:
    assert len(data().filter(lambda row: row["messages"][0]["content"].endswith("7"))) == 2
    shuffled = data().shuffle(seed=3)
    assert list(shuffled) != ROWS and sorted(map(str, shuffled)) == sorted(map(str, ROWS))
    assert list(data().shuffle(seed=3)) == list(shuffled) != list(data().shuffle(seed=4))
    # After encode the same seed gives the same order.
    assert list(data().encode().shuffle(seed=3)) == list(shuffled.encode())
    with pytest.raises(DataError, match="no rows after filter"):
        data().filter(lambda row: False)


def test_identity_rows() -> None:
    rows = Dataset(DatasetMeta("builtin://identity"))
    assert 100 <= len(rows) <= 120 and rows.origins[4] == "builtin://identity:5"
    assert len({json.dumps(row) for row in rows}) == len(rows)
    text = json.dumps(list(rows))
    assert text.count("{{NAME}}") > 60 and text.count("{{AUTHOR}}") > 50
    filled = Dataset(DatasetMeta("builtin://identity")).map(SelfCognitionProcessor("Tansy", "the Twinkle Research team"))
    assert "{{" not in json.dumps(list(filled))
    answers = [m["content"] for row in filled for m in row["messages"] if m["role"] == "assistant"]
    assert not any(a.startswith("the ") for a in answers)  # the default author reads well where it stands
    filled.set_template(template(max_length=256)).encode()
    assert not filled.dropped


# --- encode ---------------------------------------------------------------------------------------------------------


def test_features_are_those_of_the_template() -> None:
    encoded = data().encode()
    expected = template().batch_encode(ROWS)
    assert [{**f, "row": f"data[{i}]"} for i, f in enumerate(expected)] == list(encoded)
    assert encoded[-1] == encoded[19]
    with pytest.raises(IndexError):
        encoded[20]


def test_batches_and_processes_change_nothing() -> None:
    """Dropped and bad rows included."""
    rows = [chat(f"question {i}", f"answer {i} " * (1 + i % 5)) for i in range(300)]
    rows[7] = {"messages": [{"role": "user", "content": "q"}]}
    rows[290] = chat("a", "b " * 200)

    def encode(**options: object) -> Dataset:
        short = template(max_length=128, truncation_strategy="delete")
        return Dataset(DatasetMeta(data=rows), on_error="skip").set_template(short).encode(**options)

    once = encode()
    assert {d.row: d.reason for d in once.dropped} == {
        "data[7]": "no assistant message to train on",
        "data[290]": "longer than max_length=128",
    }
    for other in (encode(batched=False), encode(num_proc=2)):
        assert other.fingerprint == once.fingerprint and list(other) == list(once)
        assert sorted(map(str, other.dropped)) == sorted(map(str, once.dropped))


def test_s24_rows_of_another_layout_are_named_by_line(tmp_path, caplog) -> None:
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps(ROWS[0]), "", '"context"', '{"messages": []}', '{"prompt": "x"}']
    path.write_text("\n".join(lines))
    reasons = {3: 'a row must be a JSON object, got "context"', 4: "'messages' is empty", 5: "'prompt' without 'completion'"}
    for number, message in reasons.items():
        with pytest.raises(DataError, match=f"{path}:{number}: {message}"):
            Dataset(DatasetMeta(str(path))).set_template(template()).encode()
        lines[number - 1] = ""
        path.write_text("\n".join(lines))
    path.write_text("\n".join([json.dumps(ROWS[0]), "", '"context"', '{"messages": []}', '{"prompt": "x"}']))
    with caplog.at_level(logging.WARNING):
        rows = Dataset(DatasetMeta(str(path)), on_error="skip").set_template(template()).encode()
    assert len(rows) == 1
    assert [d.row for d in rows.dropped] == [f"{path}:{n}" for n in (3, 4, 5)]
    assert "reading dropped 1 rows" in caplog.text and "encoding dropped 2 rows" in caplog.text
    assert all(f"{path}:{n}" in caplog.text for n in (3, 4, 5))


def test_s10_dropped_rows_are_counted_and_none_left_is_an_error(caplog) -> None:
    long = chat("question " * 50, "answer")
    rows = Dataset(DatasetMeta(data=[long, ROWS[0]])).set_template(template(max_length=32, truncation_strategy="right"))
    with caplog.at_level(logging.WARNING):
        rows.encode()
    assert len(rows) == 1 and [(d.row, d.reason) for d in rows.dropped] == [("data[0]", "no trained token within max_length=32")]
    assert "encoding dropped 1 rows (of 2)" in caplog.text
    message = r"none of 7 rows can be trained on: 7 no trained token within max_length=32 \(data\[0\], .*, ...\)"
    with pytest.raises(DataError, match=message):
        Dataset(DatasetMeta(data=[long] * 7)).set_template(template(max_length=32, truncation_strategy="right")).encode()


def test_split_rows_keep_their_origin() -> None:
    rows = data([chat("q", "answer " * 30), ROWS[0]]).set_template(template(max_length=32, truncation_strategy="split")).encode()
    assert len(rows) > 2 and rows.origins.count("data[0]") == len(rows) - 1
    assert rows[-1]["row"] == "data[1]"


@pytest.mark.parametrize(("how", "said"), [("left", "cut (left)"), ("right", "cut (right)"), ("split", "split")])
def test_cut_and_split_rows_are_counted_in_one_line(how: str, said: str, caplog) -> None:
    rows = data([chat("q", "answer " * 30), ROWS[0]]).set_template(template(max_length=32, truncation_strategy=how))
    with caplog.at_level(logging.WARNING):
        rows.encode()
    message = f"data: encoding {said} 1 rows (of 2) longer than max_length=32: data[0]"
    assert [record.getMessage() for record in caplog.records] == [message]


def test_prompt_with_system_is_encoded_as_messages() -> None:
    rows = data([{"prompt": "q", "completion": "a", "system": "s"}]).encode()
    system = {"role": "system", "content": "s"}
    assert rows[0]["input_ids"] == data([{"messages": [system, *chat("q", "a")["messages"]]}]).encode()[0]["input_ids"]


def test_prompts_for_sampling() -> None:
    rows = data([{"prompt": "What?"}, chat("q", "a")]).encode(add_generation_prompt=True)
    assert set(rows[0]["labels"]) == {-100}
    assert template().decode(rows[0]["input_ids"]).endswith("<|start|>assistant\n")


def test_order_of_calls_is_checked() -> None:
    with pytest.raises(ConfigError, match="set_template must come before encode"):
        Dataset(DatasetMeta(data=ROWS)).encode()
    with pytest.raises(ConfigError, match="encode must come before encode"):
        data().encode().encode()
    with pytest.raises(ConfigError, match="map and filter must come before encode"):
        data().encode().map(len)
    with pytest.raises(ConfigError, match="num_proc must be >= 1"):
        data().encode(num_proc=0)
    with pytest.raises(ConfigError, match="on_error='skp'"):
        data(on_error="skp")
    with pytest.raises(ConfigError, match="no effect on a Template that is ready"):
        data().set_template(template(), max_length=3)


def test_template_by_name(tmp_path) -> None:
    make_tokenizer("chatml").save_pretrained(tmp_path)
    rows = Dataset(DatasetMeta(data=ROWS)).set_template("Qwen3_5Template", model_id=str(tmp_path), max_length=512)
    assert list(rows.encode(batched=True)) == list(data().encode())


def test_fingerprint_sees_content_and_settings_only() -> None:
    raw = data().fingerprint
    assert raw == data().fingerprint and raw != data(ROWS[1:]).fingerprint
    encoded = data().encode().fingerprint
    assert encoded == data().encode(batched=False).fingerprint != raw
    assert encoded != data(list(reversed(ROWS))).encode().fingerprint
    only_last = Dataset(DatasetMeta(data=ROWS)).set_template(template(train_on="all")).encode()
    assert only_last.fingerprint != encoded  # the same ids, other labels


def test_bar_in_a_terminal(capsys) -> None:
    plain = data().encode()
    assert capsys.readouterr().err == ""
    assert data().encode(progress=True).fingerprint == plain.fingerprint


# --- preview and config ---------------------------------------------------------------------------------------------


def test_preview_colours_trained_tokens_and_keeps_brackets() -> None:
    rows = data([chat("is [bold] kept?", "[red]yes[/red]")]).encode()
    text = preview(rows, rows.template, 3)
    trained = sum(label != -100 for label in rows[0]["labels"])
    assert text.plain == (
        f"data[0]: {rows[0]['length']} tokens, {trained} trained\n"
        "<|start|>user\nis [bold] kept?<|end|>\n<|start|>assistant\n[red]yes[/red]<|end|>\n\n\n"
    )
    assert "assistant\n⟦[red]yes[/red]<|end|>⟧\n" in preview(rows, rows.template, marks=True).plain
    styled = {text.plain[span.start : span.end]: span.style for span in text.spans}
    assert styled["[red]yes[/red]<|end|>"] == "bold green"
    console = Console(force_terminal=True, width=200, color_system="standard")
    with console.capture() as capture:
        console.print(text)
    assert "\x1b[1;32m[red]yes[/red]<|end|>" in capture.get()


def build(**options: object) -> tuple[Dataset, Dataset | None]:
    config = DataConfig(name="jsonl", **options)
    return build_datasets(config, build_template(config, tokenizer=make_tokenizer("chatml")), seed=5)


def test_build_from_config(tmp_path) -> None:
    path = write(tmp_path / "rows.jsonl", ROWS)
    train, held_out = build(path=str(path))
    assert len(train) == 20 and held_out is None
    assert len(build(path=str(path), limit=7)[0]) == 7
    processor = {"processor": "SelfCognitionProcessor", "processor_args": {"model_name": "X"}}
    train, held_out = build(dataset_id="builtin://identity", eval_rows=10, **processor)
    assert len(train) + len(held_out) == 110 and len(held_out) == 10
    assert not set(train.origins) & set(held_out.origins)
    train, held_out = build(path=str(path), eval_path=str(write(tmp_path / "eval.jsonl", ROWS[:3])))
    assert (len(train), len(held_out)) == (20, 3)


def test_held_out_rows_depend_on_the_seed_only(tmp_path) -> None:
    def held_out(seed: int) -> list[str]:
        rows = data()
        taken = rows.hold_out(5, seed)
        assert len(rows) == 15 and list(rows) == [row for row in ROWS if row not in list(taken)]
        return taken.origins

    assert held_out(1) == held_out(1) != held_out(2)
    for count in (0, 20, 21):
        with pytest.raises(DataError, match=f"data.eval_rows={count}: cannot hold out {count} of 20 rows of data"):
            data().hold_out(count, 0)


def test_config_errors(tmp_path) -> None:
    path = str(write(tmp_path / "rows.jsonl", [*ROWS, {"messages": []}]))
    with pytest.raises(ConfigError, match="data.template='json.dumps' is not a subclass of"):
        build(path=path, template="json.dumps")
    with pytest.raises(ConfigError, match="one of data.path and data.dataset_id"):
        build()
    with pytest.raises(ConfigError, match="data.eval_rows has no effect"):
        build(path=path, eval_path=path, eval_rows=3)
    with pytest.raises(ConfigError, match="processor_args has no effect"):
        build(path=path, processor_args={"a": 1})
    with pytest.raises(DataError, match="rows.jsonl:21: 'messages' is empty"):
        build(path=path)
    assert len(build(path=path, on_error=OnError.skip)[0].dropped) == 1
    with pytest.raises(DataError, match=r"rows.jsonl:1: \d+ tokens exceed max_length=8"):
        build(path=path, max_length=8)
    with pytest.raises(DataError, match="none of 20 rows"):
        build(path=path, max_length=8, truncation=Truncation.delete, limit=20)
