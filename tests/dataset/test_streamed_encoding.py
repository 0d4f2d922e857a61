"""Rows that pass through memory chunk by chunk give the features, and the errors, of rows that are all in memory."""

import csv
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from chat_styles import make_tokenizer

from twinkle_research.dataset import Dataset, DatasetMeta, EncodedCache
from twinkle_research.dataset.encoding import CHUNK, EncodeOptions
from twinkle_research.dataset.rows import Processor
from twinkle_research.errors import ConfigError, DataError, UserError
from twinkle_research.template import Template

ROWS = [{"prompt": f"question {i}", "completion": f"answer {i} " * (1 + i % 7)} for i in range(700)]


def template(style: str | None = "chatml", **options: object) -> Template:
    return Template(tokenizer=make_tokenizer(style), **options)


def write_jsonl(path: Path, rows: list) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_csv(path: Path, rows: list, delimiter: str = ",") -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["prompt", "completion"], delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)


WRITERS = {
    "rows.jsonl": write_jsonl,
    "list.json": lambda path, rows: path.write_text(json.dumps(rows, indent=1)),
    "object.json": lambda path, rows: path.write_text(json.dumps({"version": 1, "data": rows})),
    "lines.json": write_jsonl,
    "rows.csv": write_csv,
    "rows.tsv": lambda path, rows: write_csv(path, rows, "\t"),
    "rows.parquet": lambda path, rows: pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=100),
}


def streamed(path: object, root: Path, made: Template | None = None, limit: int | None = None, **options: object) -> Dataset:
    meta = DatasetMeta(str(path), data_slice=limit and range(limit))
    processors, on_error = options.pop("processors", ()), options.pop("on_error", "raise")
    return Dataset.encoded_from(
        meta,
        made or template(),
        processors=processors,
        on_error=on_error,
        options=EncodeOptions(**options),
        cache=EncodedCache(root),
    )


def in_memory(path: object, limit: int | None = None, on_error: str = "raise") -> Dataset:
    return Dataset(DatasetMeta(str(path), data_slice=limit and range(limit)), on_error=on_error).set_template(template()).encode()


@pytest.mark.parametrize("name", WRITERS)
def test_features_of_every_format(tmp_path, name: str) -> None:
    WRITERS[name](tmp_path / name, ROWS)
    expected = in_memory(tmp_path / name)
    found = streamed(tmp_path / name, tmp_path / "kept")
    assert list(found) == list(expected) and len(found) == 700
    assert found.fingerprint == expected.fingerprint and found.tokens == expected.tokens
    assert found.lengths(found.epoch_order(0, True, 1)).tolist() == [expected[i]["length"] for i in found.epoch_order(0, True, 1)]
    assert list(streamed(tmp_path / name, tmp_path / "kept", limit=5)) == list(in_memory(tmp_path / name, limit=5))


def test_features_of_a_folder_and_of_built_in_rows(tmp_path) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    for name in ("list.json", "rows.csv", "rows.jsonl", "rows.parquet"):
        WRITERS[name](folder / name, ROWS[:50])
    for source in (folder, "builtin://identity"):
        found = streamed(source, tmp_path / "kept")
        assert list(found) == list(in_memory(source)) and found.origins == in_memory(source).origins


def test_processes_processors_and_split_rows(tmp_path) -> None:
    """More chunks than fit on the way at once, rows of which one becomes several, and several features of a row."""
    path = tmp_path / "rows.jsonl"
    write_jsonl(path, ROWS * 5)
    made = template(max_length=40, truncation_strategy="split")

    def twice(row: dict) -> list[dict] | None:
        return None if row["prompt"].endswith("9") else [row, {**row, "prompt": "again"}]

    expected = Dataset(DatasetMeta(str(path))).map(twice).set_template(made).encode()
    for options in ({}, {"num_proc": 2}):
        found = streamed(path, tmp_path / "kept", made, processors=[Processor(twice)], **options)
        assert found.fingerprint == expected.fingerprint and found.origins == expected.origins
        assert [dropped.row for dropped in found.dropped] == [dropped.row for dropped in expected.dropped]
    held, expected_held = found.hold_out(100, 3), Dataset(DatasetMeta(str(path))).map(twice).hold_out(100, 3)
    assert list(held) == list(expected_held.set_template(made).encode())


def test_held_out_rows_are_the_same_before_and_after_encoding(tmp_path) -> None:
    """It is rows that are held out, dropped ones included, wherever it is done."""
    path = tmp_path / "rows.jsonl"
    write_jsonl(path, [*ROWS[:30], {"prompt": "bad"}, *ROWS[30:60]])
    before = Dataset(DatasetMeta(str(path)), on_error="skip").set_template(template())
    held = before.hold_out(20, 4)
    after = streamed(path, tmp_path / "kept", on_error="skip")
    held_after = after.hold_out(20, 4)
    assert list(held_after) == list(held.encode()) and list(after) == list(before.encode())
    assert held_after.fingerprint != after.fingerprint
    again = streamed(path, tmp_path / "kept", on_error="skip")
    assert again.hold_out(20, 4).fingerprint == held_after.fingerprint and again.fingerprint == after.fingerprint
    assert list(again.shuffle(2)) == list(after.shuffle(2)) != list(streamed(path, tmp_path / "kept", on_error="skip"))
    with pytest.raises(DataError, match="cannot hold out 61 of 61 rows"):
        streamed(path, tmp_path / "kept", on_error="skip").hold_out(61, 0)
    write_jsonl(path, [{"prompt": "bad"}, ROWS[0]])
    for seed in range(5):
        with pytest.raises(DataError, match="none of the 1 (held-out rows|rows left for training) can be trained on"):
            streamed(path, tmp_path / "kept", on_error="skip").hold_out(1, seed)


@pytest.mark.parametrize("num_proc", [1, 2])
def test_the_first_bad_row_of_the_file_is_named(tmp_path, num_proc: int) -> None:
    """Whether it cannot be read or cannot be encoded, and however far ahead rows are read."""
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps(row) for row in ROWS]
    bad = {
        600: ("{broken", "not valid JSON"),
        300: ('{"prompt": "x"}', "'prompt' without 'completion'"),
        10: ("[]", "a row must be"),
    }
    for line, (text, reason) in bad.items():
        lines[line - 1] = text
        path.write_text("\n".join(lines))
        if num_proc == 1 or line == 300:  # starting processes takes a while
            with pytest.raises(DataError, match=f"{path}:{line}: {reason}"):
                streamed(path, tmp_path / "kept", num_proc=num_proc)


def test_a_bad_row_at_the_start_of_the_second_chunk(tmp_path) -> None:
    """No process is started for one chunk, and the rows before the bad one come first."""
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps(row) for row in ROWS[:CHUNK]] + ["{broken"]
    path.write_text("\n".join(lines))
    with pytest.raises(DataError, match=f"{path}:{CHUNK + 1}: not valid JSON"):
        streamed(path, tmp_path / "kept", num_proc=2)
    path.write_text("\n".join([*lines[:4], '{"prompt": "x"}', *lines[5:]]))
    with pytest.raises(DataError, match=f"{path}:5: 'prompt' without 'completion'"):
        streamed(path, tmp_path / "kept", num_proc=2)


def test_time_limit(tmp_path) -> None:
    made = template()
    encode = made.encode_rows

    def slowly(*args: object) -> object:
        time.sleep(0.02)
        return encode(*args)

    made.encode_rows = slowly
    with pytest.raises(UserError, match=r"took longer than timeout=0.01 s \(256 rows were done\)"):
        Dataset(DatasetMeta(data=ROWS)).set_template(made).encode(batched=True, num_proc=1, timeout=0.01)
    assert len(Dataset(DatasetMeta(data=ROWS[:20])).set_template(template()).encode(batched=True, num_proc=8, timeout=3600)) == 20
    with pytest.raises(ConfigError, match="timeout must be > 0"):
        Dataset(DatasetMeta(data=ROWS)).set_template(template()).encode(timeout=0)


# --- memory ---------------------------------------------------------------------------------------------------------


TEXT = "all work and no play makes a dull row of text "


@pytest.mark.parametrize("part", [lambda: (i for i in (3, 1)), lambda: np.array([3, 1]), lambda: {3: 0, 1: 0}])
def test_a_slice_is_read_as_often_as_it_is_needed(tmp_path, part) -> None:
    """For the key, for the rows, and again by every other data set of the same meta."""
    WRITERS["rows.jsonl"](tmp_path / "rows.jsonl", ROWS[:5])
    meta = DatasetMeta(str(tmp_path / "rows.jsonl"), data_slice=part())
    for _ in range(2):
        found = Dataset.encoded_from(meta, template(), cache=EncodedCache(tmp_path / "kept"))
        assert [feature["row"] for feature in found] == [f"{tmp_path}/rows.jsonl:{line}" for line in (4, 2)]
        assert [row["prompt"] for row in Dataset(meta)] == [ROWS[3]["prompt"], ROWS[1]["prompt"]]


def test_memory_does_not_grow_with_the_rows(tmp_path) -> None:
    """In a process of its own: here memory that earlier tests have freed would be used again, and not count."""
    driver = Path(__file__).with_name("memory_driver.py")
    done = subprocess.run([sys.executable, driver, tmp_path], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    grown = json.loads(done.stdout)
    index = 8_000 * 38 / 2**20  # the arrays that stand for the features, and an order
    assert grown["more rows"] < grown["few rows"] + index + 4 < grown["more rows in memory"] - 3, grown


@pytest.mark.parametrize("name", ["list.json", "object.json", "rows.csv", "rows.parquet"])
def test_files_are_read_piece_by_piece(tmp_path, name: str) -> None:
    """40,000 rows more are 14 MB of text and 30 MB of Python objects. Parquet: all rows in one row group."""
    paths = []
    for count in (2_000, 42_000):
        paths.append(tmp_path / f"{count}-{name}")
        rows = [{"prompt": f"row {i}: {TEXT * 6}", "completion": str(i)} for i in range(count)]
        if name == "rows.parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), paths[-1], row_group_size=count)
        else:
            WRITERS[name](paths[-1], rows)
    driver = Path(__file__).with_name("reading_driver.py")
    done = subprocess.run([sys.executable, driver, *paths], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    grown = json.loads(done.stdout)
    assert grown["long"] < grown["short"] + 12 < grown["long in memory"] - 8, grown
