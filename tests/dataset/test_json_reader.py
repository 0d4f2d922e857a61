"""JSON files are read block by block: whatever the size of the blocks, the rows and errors are those of the whole file."""

import json
import random

import pytest

from twinkle_research.dataset import json_reader
from twinkle_research.dataset.reader import read_path
from twinkle_research.errors import DataError


def outcome(path, block: int, monkeypatch) -> list[object]:
    """Rows with their origins, bad rows, and the error that ended the reading."""
    monkeypatch.setattr(json_reader, "BLOCK", block)
    found: list[object] = []
    try:
        for origin, row in read_path(path, lambda origin, reason: found.append((str(origin), reason))):
            found.append((str(origin), row))
    except DataError as error:
        found.append(str(error))
    return found


def random_value(draw: random.Random, depth: int = 0) -> object:
    kind = draw.randrange(7 if depth < 3 else 5)
    if kind == 5:
        return [random_value(draw, depth + 1) for _ in range(draw.randrange(4))]
    if kind == 6:
        return {f"k{i}": random_value(draw, depth + 1) for i in range(draw.randrange(4))}
    return [draw.randrange(10**6), -draw.random(), None, draw.choice(['a"b\\c', "]}", "{[", "ä€\u2028", ""]), True][kind]


DOCUMENTS = [
    '[{"a": 1},\n{"a" 2}]',
    '[{"a": 1}\n{"a": 2}]',
    '[{"a": "unclosed}]',
    '[{"a": 1},\n  {"b": tru}]',
    "[1234567, {}, 12.5e3]",
    '[{"a": 1}] x',
    '{"version": 12345, "data": [{"a": 1}, 7, {"b": [2, "]"]}]}',
    '{"data":\n [{"a": 1},\n\n {"b": }]}',
    '{"about": {"n": [1, 2, "}"]}, "rows": []}',
    "",
    "nul",
]


def test_blocks_change_nothing(tmp_path, monkeypatch) -> None:
    draw = random.Random(5)
    path = tmp_path / "rows.json"
    for number in range(60):
        rows = [{"row": random_value(draw)} for _ in range(draw.randrange(1, 6))]
        text = json.dumps(rows, indent=draw.choice([None, 0, 3]), ensure_ascii=draw.random() < 0.5)
        whole = json.dumps({"name": "x", "data": rows}, indent=1) if number % 3 == 0 else text
        if number % 4 == 1:  # damaged somewhere
            at = draw.randrange(len(whole))
            whole = whole[:at] + draw.choice(["", "x", "]", '"', "\n"]) + whole[at + 1 :]
        path.write_text(whole, encoding="utf-8")
        expected = outcome(path, 1 << 20, monkeypatch)
        if number % 4 != 1:
            assert [row for _, row in expected] == rows
        for block in (1, 2, 7, 50):
            assert outcome(path, block, monkeypatch) == expected, whole


@pytest.mark.parametrize("text", DOCUMENTS)
def test_errors_do_not_depend_on_blocks(tmp_path, monkeypatch, text: str) -> None:
    path = tmp_path / "rows.json"
    path.write_text(text)
    expected = outcome(path, 1 << 20, monkeypatch)
    for block in (1, 3, 10):
        assert outcome(path, block, monkeypatch) == expected


def test_error_positions_are_those_of_the_file(tmp_path, monkeypatch) -> None:
    path = tmp_path / "rows.json"
    path.write_text('[{"a": 1}, {"b": 1},\n   {"c": 1}, {"d": x}]')
    for block in (4, 1 << 20):
        assert outcome(path, block, monkeypatch)[-1] == f"{path}:2: not valid JSON: Expecting value at column 20"


def test_bytes_that_are_not_utf8_are_found_in_any_block(tmp_path, monkeypatch) -> None:
    path = tmp_path / "rows.json"
    path.write_bytes(b"[\n" + '{"a": "é€"},\n'.encode() * 40 + b'{"a": "\xe9"}]')
    for block in (1, 5, 1 << 20):
        assert outcome(path, block, monkeypatch)[-1] == f"{path}:42: not UTF-8 (byte 0xe9)"
    path.write_bytes(b'[{"a": "\xe2\x82')  # ends within a character
    assert outcome(path, 3, monkeypatch) == [f"{path}:1: not UTF-8 (byte 0xe2)"]
