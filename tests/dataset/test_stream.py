"""IterableDataset: features made while they are used."""

import json
import logging
from itertools import islice
from pathlib import Path

import pytest
from chat_styles import make_tokenizer

from twinkle_research.dataset import Dataset, DatasetMeta, IterableDataset
from twinkle_research.dataset.preview import preview
from twinkle_research.dataset.stream import START
from twinkle_research.errors import ConfigError, DataError
from twinkle_research.template import Template

ROWS = [{"prompt": f"question {i}", "completion": f"answer {i} " * (1 + i % 7)} for i in range(600)]


def template(**options: object) -> Template:
    return Template(tokenizer=make_tokenizer("chatml"), **options)


def write(path: Path, rows: list = ROWS) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def stream(path: Path, made: Template | None = None, **options: object) -> IterableDataset:
    return IterableDataset(DatasetMeta(str(path)), **options).set_template(made or template())


def twice(row: dict) -> list[dict]:
    return [row, {**row, "prompt": "again"}]


@pytest.mark.parametrize("num_proc", [1, 2])
def test_features_are_those_of_an_encoded_data_set(tmp_path, num_proc: int) -> None:
    path = write(tmp_path / "rows.jsonl")
    made = template(max_length=40, truncation_strategy="split")
    expected = list(Dataset(DatasetMeta(str(path))).map(twice).set_template(made).encode())
    rows = stream(path, made, num_proc=num_proc).map(twice)
    assert list(rows) == expected
    if num_proc == 1:  # starting processes takes a while
        assert list(rows) == expected  # a second pass


def test_every_position_is_found_again(tmp_path) -> None:
    """Within split rows, and where a processor makes several rows of one."""
    path = write(tmp_path / "rows.jsonl", ROWS[:30])
    rows = stream(path, template(max_length=30, truncation_strategy="split")).map(twice)
    everything = list(rows.features())
    assert len(everything) > 90 and [p for p, _ in everything] == sorted({p for p, _ in everything})
    for i in range(0, len(everything), 7):
        position = everything[i][0]
        assert list(rows.features(position)) == everything[i + 1 :]
    assert list(rows.features(everything[-1][0])) == [] and everything[0][0] == START._replace(features=1)


def test_limit_and_bad_rows(tmp_path, caplog) -> None:
    caplog.set_level(logging.WARNING)
    path = write(tmp_path / "rows.jsonl", [ROWS[0], {"prompt": "x"}, ROWS[1], *[{"prompt": "x"}] * 20, *ROWS[2:300]])
    with pytest.raises(DataError, match=f"{path}:2: 'prompt' without 'completion'"):
        list(stream(path))
    found = list(stream(path, on_error="skip"))
    assert len(found) == 300 and found[1]["row"] == f"{path}:3"
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"{path}: so far, encoding dropped 21 rows (of 256): 21 'prompt' without 'completion' ({path}:2, {path}:4, "
                    f"{path}:5, {path}:6, {path}:7, ...)"]  # fmt: skip
    meta = DatasetMeta(str(path), data_slice=range(1))
    assert len(list(IterableDataset(meta).set_template(template()))) == 1
    write(path, [{"prompt": "x"}] * 3)
    with pytest.raises(DataError, match="no row can be trained on: 3 'prompt' without 'completion'"):
        list(stream(path, on_error="skip"))


def test_only_what_is_asked_for_is_read(tmp_path) -> None:
    path = write(tmp_path / "rows.jsonl")
    path.write_text(path.read_text() + "{broken")
    assert len(list(islice(stream(path), 512))) == 512
    with pytest.raises(DataError, match=f"{path}:601"):
        list(stream(path))


def test_fingerprint_sees_content_and_settings(tmp_path) -> None:
    path = write(tmp_path / "rows.jsonl")
    first = stream(path).fingerprint
    path.rename(tmp_path / "other.jsonl")
    same = stream(tmp_path / "other.jsonl", num_proc=2).fingerprint
    write(path, ROWS[1:])
    others = [
        stream(path),
        stream(tmp_path / "other.jsonl", template(train_on="all")),
        stream(tmp_path / "other.jsonl").map(twice),
        IterableDataset(DatasetMeta(str(tmp_path / "other.jsonl"), data_slice=range(9))).set_template(template()),
    ]
    assert same == first and len({first, *(other.fingerprint for other in others)}) == 5


def test_rows_that_can_be_read_once_only_are_no_second_pass() -> None:
    rows = IterableDataset(DatasetMeta(data=(row for row in ROWS[:3]))).set_template(template())
    assert len(list(rows)) == 3
    with pytest.raises(DataError, match="data: its rows are a generator, which can be read once only"):
        list(rows)


def test_an_empty_cell_is_no_answer(tmp_path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('prompt,completion\na,b\nq,\nq,""\nc,d\n')
    with pytest.raises(DataError, match=f"{path}:3: 'completion' is null"):
        list(stream(path))
    assert [feature["row"] for feature in stream(path, on_error="skip")] == [f"{path}:2", f"{path}:5"]


def test_preview_and_mistakes(tmp_path) -> None:
    path = write(tmp_path / "rows.jsonl")
    text = preview(stream(path), template(), 2).plain
    assert text.count(" trained\n") == 2 and f"{path}:2: " in text
    with pytest.raises(ConfigError, match="set_template must come before"):
        next(iter(IterableDataset(DatasetMeta(str(path)))))
    with pytest.raises(ConfigError, match="on_error='skp'"):
        stream(path, on_error="skp")
    with pytest.raises(DataError, match="no such file"):
        stream(tmp_path / "missing.jsonl")
    with pytest.raises(ConfigError, match="no effect on a Template that is ready"):
        stream(path).set_template(template(), max_length=4)
