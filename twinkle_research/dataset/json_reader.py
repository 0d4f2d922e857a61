"""JSON files to rows, read block by block: a list of rows, or an object with such a list under "data"."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from twinkle_research.dataset.rows import OnBad, Origin, Row
from twinkle_research.errors import DataError
from twinkle_research.template.messages import unreadable_json

BLOCK = 1 << 20  # characters read at a time
_FIRST_LINE = 1 << 20  # bytes of the first line that are looked at
_SPACE = " \t\r\n"


def read_json(path: Path, on_bad: OnBad) -> Iterator[tuple[Origin, Row]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        window = _Window(path, file)
        first = window.peek()
        rows = _list_rows(window, on_bad) if first == "[" else _object_rows(window, on_bad)
        for origin, row in rows:
            if isinstance(row, dict):
                yield origin, row
            else:
                on_bad(origin, f"a row must be a JSON object, got {shown(row)}")


def is_json_lines(path: Path) -> bool:
    """True for JSON Lines under the name .json: the first line is a value of its own, no list, and more follows."""
    with path.open("rb") as file:
        line = b""
        while not line:
            raw = file.readline(_FIRST_LINE)
            if not raw:
                return False
            line = raw.removeprefix(codecs.BOM_UTF8).strip()
        more = next((True for block in iter(lambda: file.read(BLOCK), b"") if block.strip()), False)
    if not more or line.startswith(b"["):
        return False
    try:
        text = line.decode()
        json.loads(text)
    except (json.JSONDecodeError, UnicodeDecodeError):
        return False
    except (ValueError, RecursionError):
        return _end_of_value(text, 0) == len(text)
    return True


def raise_not_utf8(path: Path) -> NoReturn:
    """The DataError for a file that could not be decoded; finds the line again, for a decoder is ahead of its reader."""
    decoder, line = codecs.getincrementaldecoder("utf-8")(), 1
    with path.open("rb") as file:
        while True:
            block = file.read(BLOCK)
            try:
                decoder.decode(block, final=not block)
            except UnicodeDecodeError as exc:
                line += exc.object.count(b"\n", 0, exc.start)
                raise DataError(f"{path}:{line}: not UTF-8 (byte {exc.object[exc.start]:#04x})") from exc
            if not block:
                raise DataError(f"{path}: was changed while it was read")
            line += block.count(b"\n")


def shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


class _Window:
    """The part of a file from the present position on that has been read so far."""

    def __init__(self, path: Path, file: Any):
        self.path = path
        self.file = file
        self.text = ""
        self.position = 0
        self._line, self._counted = 1, 0  # the line of the character at ``_counted``
        self._column = 0  # characters of its line that stood before ``text``
        self._decoder = json.JSONDecoder()

    @property
    def line(self) -> int:
        self._line += self.text.count("\n", self._counted, self.position)
        self._counted = self.position
        return self._line

    def error(self, reason: str, position: int | None = None) -> DataError:
        """``position`` in ``text``: also names the column there."""
        if position is None:
            return DataError(f"{self.path}:{self.line}: not valid JSON: {reason}")
        line = self.line + self.text.count("\n", self.position, position)
        start = self.text.rfind("\n", 0, position)
        column = position - start + (self._column if start < 0 else 0)
        return DataError(f"{self.path}:{line}: not valid JSON: {reason} at column {column}")

    def peek(self) -> str:
        """The next character that is no space; '' at the end."""
        while True:
            while self.position < len(self.text) and self.text[self.position] in _SPACE:
                self.position += 1
            if self.position < len(self.text):
                return self.text[self.position]
            if not self._read_on():
                return ""

    def take(self, character: str, otherwise: str) -> None:
        if self.peek() != character:
            raise self.error(otherwise)
        self.position += 1

    def value(self) -> Any:
        """The value at the position. ValueError or RecursionError where Python cannot hold it (see ``skip``)."""
        self.peek()
        while True:
            try:
                value, end = self._decoder.raw_decode(self.text, self.position)
            except json.JSONDecodeError as exc:
                if self._is_whole() or not self._read_on():
                    raise self.error(exc.msg, exc.pos) from exc
            else:
                if not self._may_go_on(end) or not self._read_on():
                    self.position = end
                    return value

    def skip(self) -> None:
        """Goes past a value without reading it, as json cannot."""
        while True:
            end = _end_of_value(self.text, self.position)
            if end is not None and (not self._may_go_on(end) or not self._read_on()):
                self.position = end
                return
            if end is None and not self._read_on():
                raise self.error("the row is not closed")

    def _may_go_on(self, end: int) -> bool:
        """True where the value from the position to ``end`` is a number whose rest may stand in the next block."""
        number = _NUMBER.match(self.text, self.position)
        return number is not None and max(end, number.end()) == len(self.text)

    def _is_whole(self) -> bool:
        """True where the value at the position ends within ``text``, so that an error in it is not for want of more."""
        if self.text[self.position : self.position + 1] in ("[", "{"):
            return _end_of_value(self.text, self.position) is not None
        if self.text.startswith('"', self.position):
            return _STRING.match(self.text, self.position) is not None
        return len(self.text) - self.position > 16  # no word of JSON is as long

    def _read_on(self) -> bool:
        """Adds at least as much text as is left; forgets what lies before the position. False at the end of the file.

        Raises DataError where the file is not UTF-8.
        """
        try:
            more = self.file.read(max(BLOCK, len(self.text) - self.position))
        except UnicodeDecodeError:
            raise_not_utf8(self.path)
        if not more:
            return False
        start = self.text.rfind("\n", 0, self.position)
        self._column = self.position + self._column if start < 0 else self.position - start - 1
        self._line, self._counted = self.line, 0
        self.text = self.text[self.position :] + more
        self.position = 0
        return True


def _list_rows(window: _Window, on_bad: OnBad) -> Iterator[tuple[Origin, Any]]:
    for line, _, item in _items(window, on_bad, by_line=True):
        yield Origin(str(window.path), line, is_line=True), item
    if window.peek():
        raise window.error("text after the end of the list")


def _items(window: _Window, on_bad: OnBad, by_line: bool) -> Iterator[tuple[int, int, Any]]:
    """(line, number, item) of a list's items. ``by_line``: how an item that cannot be held is named."""
    window.take("[", "a list expected")
    number, expect_comma = 0, False
    while character := window.peek():
        if character == "]":
            window.position += 1
            return
        if expect_comma:
            window.take(",", "',' expected between two rows")
            expect_comma = False
            continue
        line = window.line
        try:
            item = window.value()
        except (ValueError, RecursionError) as exc:
            on_bad(Origin(str(window.path), line if by_line else number, by_line), unreadable_json(exc))
            window.skip()
        else:
            yield line, number, item
        number += 1
        expect_comma = True
    raise window.error("the list is not closed")


def _object_rows(window: _Window, on_bad: OnBad) -> Iterator[tuple[Origin, Any]]:
    path = window.path
    wanted = f'{path}: a JSON file must hold a list of rows, or an object {{"data": [rows]}}; got '
    others: dict[str, Any] = {}
    found = False
    try:
        if window.peek() != "{":
            raise DataError(wanted + shown(window.value()))
        window.position += 1
        while window.peek() != "}":
            if others or found:
                window.take(",", "',' expected between two keys")
            if window.peek() != '"':
                raise window.error("a key in double quotes expected")
            key = window.value()
            window.take(":", "':' expected after a key")
            if key == "data" and window.peek() == "[":
                if found:
                    raise DataError(f"{path}:{window.line}: the key 'data' stands twice")
                found = True
                for _, number, item in _items(window, on_bad, by_line=False):
                    yield Origin(str(path), number), item
            else:
                others[key] = window.value()
    except (ValueError, RecursionError) as exc:
        raise DataError(f"{path}: {unreadable_json(exc)}") from exc
    window.position += 1
    if not found:
        raise DataError(wanted + shown(others))
    if window.peek():
        raise window.error("text after the end of the object")


_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_STRING_OR_BRACKET = re.compile(_STRING.pattern + r'|[\[\]{}"]', re.DOTALL)
_NUMBER = re.compile(r"[-+.\w]+")


def _end_of_value(text: str, start: int) -> int | None:
    """Where the JSON list, object or number at ``start`` ends; found without reading it, as json cannot. None: nowhere."""
    if text[start] not in "[{":
        return _NUMBER.match(text, start).end()
    depth = 0
    for match in _STRING_OR_BRACKET.finditer(text, start):
        if match[0] == '"':
            return None  # a string that is not closed
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return match.end()
    return None
