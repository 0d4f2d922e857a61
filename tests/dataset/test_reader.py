"""Local files to rows: case S24, and what JSON, CSV and Parquet files look like."""

import json
import logging

import pyarrow
import pyarrow.parquet
import pytest

from twinkle_research.dataset import Dataset, DatasetMeta
from twinkle_research.dataset.reader import read_path
from twinkle_research.errors import DataError

ROW = {"messages": [{"role": "user", "content": "hi"}]}
LINE = json.dumps(ROW).encode()


def read(path) -> list[dict]:
    return [row for _, row in read_path(path)]


def origins(path) -> list[str]:
    return [str(origin).removeprefix(str(path)) for origin, _ in read_path(path)]


def read_with_bad(path) -> tuple[list[str], list[tuple[str, str]]]:
    """Origins of the rows, and (origin, reason) of bad ones."""
    bad: list[tuple[str, str]] = []
    good = [str(origin) for origin, _ in read_path(path, lambda origin, reason: bad.append((str(origin), reason)))]
    return good, bad


def test_s24_separators_inside_text_do_not_split_rows(tmp_path) -> None:
    text = "a\u2028b\u2029c\u0085d"
    path = tmp_path / "rows.jsonl"
    path.write_bytes(json.dumps({"prompt": text}, ensure_ascii=False).encode() + b"\n")
    assert read(path) == [{"prompt": text}]


def test_s24_bom_crlf_and_blank_lines(tmp_path) -> None:
    path, clean = tmp_path / "rows.jsonl", tmp_path / "clean.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + LINE + b"\r\n\n   \n" + LINE + b"\r\n\n" + LINE)
    clean.write_bytes(b"\n".join([LINE] * 3) + b"\n")
    assert read(path) == read(clean) == [ROW] * 3
    assert origins(path) == [":1", ":4", ":6"]


def test_s24_bad_lines_are_named_by_physical_line(tmp_path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(LINE + b'\n\n"context"\n[1]\n{"a": }\n\xff\xfe\n' + b"[" * 100_000 + b"\n" + LINE)
    with pytest.raises(DataError, match=rf'{path}:3: a row must be a JSON object, got "context"'):
        read(path)
    good, bad = read_with_bad(path)
    assert good == [f"{path}:1", f"{path}:8"]
    assert [origin.rsplit(":", 1)[1] for origin, _ in bad] == ["3", "4", "5", "6", "7"]
    assert [reason for _, reason in bad[2:]] == [
        "not valid JSON: Expecting value at column 7", "not UTF-8 (byte 0xff at position 0)", "JSON is nested too deeply",
    ]  # fmt: skip


def test_json_list_knows_the_line_of_each_row(tmp_path) -> None:
    path = tmp_path / "rows.json"
    path.write_text('\ufeff[\n  {"a": 1},\n\n  {"a":\n 2}, {"a": "\\n"}\n]\n', encoding="utf-8")
    assert read(path) == [{"a": 1}, {"a": 2}, {"a": "\n"}]
    assert origins(path) == [":2", ":4", ":5"]
    path.write_text("[]")
    assert read(path) == []


def test_json_object_with_data_and_json_lines_under_the_name_json(tmp_path) -> None:
    path = tmp_path / "rows.json"
    path.write_text('{"version": 1, "data": [{"a": 1}, {"a": 2}]}')
    assert read(path) == [{"a": 1}, {"a": 2}] and origins(path) == ["[0]", "[1]"]
    path.write_text('{"a": 1}\n{"a": 2}\n')
    assert read(path) == [{"a": 1}, {"a": 2}] and origins(path) == [":1", ":2"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1}', r"must hold a list of rows.*got \{\"a\": 1\}"),
        ("3", "must hold a list of rows"),
        ('{"a": 1', ":1: not valid JSON"),
        ('[{"a": 1}\n{"a": 2}]', ":2: not valid JSON: ',' expected"),
        ('[{"a": 1},\n{"a" 2}]', ":2: not valid JSON: Expecting ':' delimiter"),
        ('[{"a": 1},\n', ":2: not valid JSON: the list is not closed"),
        ("[{}]\n3", ":2: not valid JSON: text after the end"),
        ('{"data":\n [{}]}\n]', ":3: not valid JSON: text after the end"),
        ('{"data": [{}], "data": []}', ":1: the key 'data' stands twice"),
        ('{"a": 1,\n b: 2}', ":2: not valid JSON: a key in double quotes expected"),
        ('{"a" 1}', ":1: not valid JSON: ':' expected"),
        ('{"a": 1 "b": 2}', ":1: not valid JSON: ',' expected"),
        ('[{}, "x"]', ':1: a row must be a JSON object, got "x"'),
    ],
)
def test_bad_json_files(tmp_path, text: str, message: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        read(path)
    path.write_bytes(b"[\n\n\xff]")
    with pytest.raises(DataError, match=":3: not UTF-8"):
        read(path)


def test_csv(tmp_path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes('\ufeffprompt,completion\r\n"two\nlines","say ""hi"""\r\n\r\nü,1\r\n'.encode())
    assert read(path) == [{"prompt": "two\nlines", "completion": 'say "hi"'}, {"prompt": "ü", "completion": "1"}]
    assert origins(path) == [":2", ":5"]
    path.write_text('prompt,completion\na,\n,""\n')
    assert read(path) == [{"prompt": "a", "completion": None}, {"prompt": None, "completion": None}]
    path.write_text("prompt,completion\na,b\nc\n")
    with pytest.raises(DataError, match=":3: 1 fields, but the header has 2"):
        read(path)
    path.write_text("prompt,completion\n" + "x" * 200_000 + ",y\n")
    assert len(read(path)[0]["prompt"]) == 200_000
    path.write_text('prompt\n"open')
    with pytest.raises(DataError, match="rows.csv:"):
        read(path)
    path.write_text("")
    with pytest.raises(DataError, match="no header"):
        read(path)
    tabs = tmp_path / "rows.tsv"
    tabs.write_text("prompt\tcompletion\na,b\tc\n")
    assert read(tabs) == [{"prompt": "a,b", "completion": "c"}]


def test_parquet(tmp_path) -> None:
    path = tmp_path / "rows.parquet"
    rows = [{"messages": [{"role": "user", "content": "hi"}], "id": i} for i in range(3)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert read(path) == rows and origins(path) == ["[0]", "[1]", "[2]"]
    path.write_bytes(b"not parquet at all")
    with pytest.raises(DataError, match="not a readable Parquet file"):
        read(path)


def test_folder_is_read_in_the_order_of_names(tmp_path) -> None:
    (tmp_path / "b.jsonl").write_text('{"n": 2}\n')
    (tmp_path / "a.csv").write_text("n\n1\n")
    (tmp_path / "README.md").write_text("not data")
    (tmp_path / ".hidden.jsonl").write_text("{")
    assert read(tmp_path) == [{"n": "1"}, {"n": 2}]


def test_what_cannot_be_read_is_named(tmp_path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match=r"row.jsonl: no such file; did you mean '.*/rows.jsonl'"):
        read(tmp_path / "row.jsonl")
    with pytest.raises(DataError, match="the folder .* does not exist either"):
        read(tmp_path / "nowhere" / "rows.jsonl")
    (tmp_path / "rows.xlsx").write_text("")
    with pytest.raises(DataError, match="unknown file type '.xlsx'; readable: .jsonl"):
        read(tmp_path / "rows.xlsx")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no data files in the folder"):
        read(tmp_path / "empty")


DIGITS, DEEP = "1" * 5000, "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_rows_that_python_cannot_hold_are_bad_rows(tmp_path, name: str) -> None:
    path = tmp_path / name
    path.write_text(f'{{"a": {DIGITS}}}\n{{"a": {DEEP}}}\n{{"a": 1}}\n')
    with pytest.raises(DataError, match=f"{path}:1: a number has more than 4300 digits"):
        read(path)
    good, bad = read_with_bad(path)
    assert good == [f"{path}:3"]
    assert bad == [(f"{path}:1", "a number has more than 4300 digits"), (f"{path}:2", "JSON is nested too deeply")]


def test_rows_that_python_cannot_hold_in_a_json_list(tmp_path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(f'[{{"a": {DIGITS}, "b": "]\\"}}"}},\n{{"a": {DEEP}}},\n{DIGITS},\n{{"a": 1}}]')
    good, bad = read_with_bad(path)
    assert good == [f"{path}:4"]
    assert [origin for origin, _ in bad] == [f"{path}:{n}" for n in (1, 2, 3)]
    path.write_text("[" + "[" * 100_000)
    with pytest.raises(DataError, match=":1: JSON is nested too deeply"):
        read(path)
    with pytest.raises(DataError, match=":1: not valid JSON: the row is not closed"):
        list(read_path(path, lambda *b: None))
    path.write_text(f'{{"data": [{DIGITS}]}}')
    with pytest.raises(DataError, match=r"rows.json\[0\]: a number has more than 4300 digits"):
        read(path)


def test_csv_header_and_encoding(tmp_path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("prompt,completion,prompt\na,b,c\n")
    with pytest.raises(DataError, match=":1: the column 'prompt' stands twice"):
        read(path)
    path.write_bytes(b"prompt\n" + b"a\n" * 5000 + b"\xe4\n")
    with pytest.raises(DataError, match=r":5002: not UTF-8 \(byte 0xe4\)"):
        read(path)


def test_what_is_not_read_in_a_folder_is_named_once(tmp_path, caplog) -> None:
    (tmp_path / "a.jsonl").write_text('{"n": 1}\n')
    for name in ("README.md", "b.jsonl.gz", ".c.jsonl", ".gitattributes"):
        (tmp_path / name).write_text("x")
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "sub").mkdir()
    (tmp_path / "link.jsonl").symlink_to("nowhere.jsonl")
    with caplog.at_level(logging.WARNING):
        assert list(Dataset(DatasetMeta(str(tmp_path)))) == [{"n": 1}]
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}: not read: .c.jsonl (hidden), README.md (unknown file type), b.jsonl.gz (compressed; unpack it), "
        "empty.csv (empty), link.jsonl (a link to nothing), sub (a folder)"
    ]
    (tmp_path / "a.jsonl").unlink()
    with pytest.raises(DataError, match="no data files in the folder .*; not read: .*empty.csv"):
        read(tmp_path)


def test_dangling_links_and_patterns_are_said_to_be_such(tmp_path) -> None:
    (tmp_path / "rows.jsonl").symlink_to("nowhere.jsonl")
    with pytest.raises(DataError, match="rows.jsonl: a link to nowhere.jsonl, which does not exist"):
        read(tmp_path / "rows.jsonl")
    with pytest.raises(DataError, match="patterns are not read; give the folder"):
        read(tmp_path / "*.jsonl")
    with pytest.raises(DataError, match="patterns are not read; give the folder"):
        Dataset(DatasetMeta("rows/*"))
