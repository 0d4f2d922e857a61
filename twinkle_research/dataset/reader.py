"""Local files to rows. Each row comes with its origin, "file:line" (physical, from 1) or "file[index]" (from 0).

Rows stay Python objects. Columnar inference would force one type on a key (a tool argument that is text in one row
and a number in the next) and give every row the keys of all.
"""

from __future__ import annotations

import csv
import difflib
import json
import logging
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from twinkle_research.errors import DataError
from twinkle_research.template.messages import unreadable_json

logger = logging.getLogger(__name__)

Row = dict[str, Any]
OnBad = Callable[[str, str], None]  # (origin, reason); raises, or notes the row as skipped


def raise_bad_row(origin: str, reason: str) -> None:
    raise DataError(f"{origin}: {reason}")


def read_path(path: str | Path, on_bad: OnBad = raise_bad_row) -> Iterator[tuple[str, Row]]:
    """Rows of a JSONL, JSON, CSV, TSV or Parquet file, or of all such files of a folder in the order of their names."""
    path = Path(path).expanduser()
    files = data_files(path)
    unread = _unread(path) if path.is_dir() else ""
    if unread:
        logger.warning("%s: not read: %s", path, unread)
    for file in files:
        yield from _READERS[file.suffix.lower()](file, on_bad)


def data_files(path: Path) -> list[Path]:
    """The files that ``path`` stands for. DataError where there are none."""
    known = ", ".join(_READERS)
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if _why_unread(file) is None)
        if not files:
            unread = _unread(path)
            raise DataError(
                f"{path}: no data files in the folder (looked for {known})" + (f"; not read: {unread}" if unread else "")
            )
        return files
    if not path.exists():
        if path.is_symlink():
            raise DataError(f"{path}: a link to {os.readlink(path)}, which does not exist")
        if is_pattern(path.name):
            raise DataError(f"{path}: no such file; patterns are not read; give the folder")
        raise DataError(f"{path}: no such file{_similar(path)}")
    if path.suffix.lower() not in _READERS:
        raise DataError(f"{path}: unknown file type {path.suffix!r}; readable: {known}")
    return [path]


def is_pattern(name: str) -> bool:
    return any(c in name for c in "*?[")


def _unread(folder: Path) -> str:
    """The entries of a folder that are not read, each with the reason; '' for none."""
    names = [f"{file.name} ({reason})" for file in sorted(folder.iterdir()) if (reason := _why_unread(file))]
    return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")


def _why_unread(file: Path) -> str | None:
    """Why an entry of a folder is not read; None where it is, '' where nobody would expect it (.gitattributes)."""
    if file.name.startswith("."):
        return "hidden" if file.suffix.lower() in _READERS else ""
    if file.is_dir():
        return "a folder"
    if not file.exists():
        return "a link to nothing"
    if file.suffix.lower() in _COMPRESSED:
        return "compressed; unpack it"
    if file.suffix.lower() not in _READERS:
        return "unknown file type"
    if not file.is_file():
        return "not a regular file"
    return "empty" if file.stat().st_size == 0 else None


def _similar(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f" (the folder {folder} does not exist either)"
    close = difflib.get_close_matches(path.name, [f.name for f in folder.iterdir()], n=1, cutoff=0.6)
    return f"; did you mean '{folder / close[0]}'?" if close else ""


def _read_jsonl(path: Path, on_bad: OnBad) -> Iterator[tuple[str, Row]]:
    # Binary iteration splits at \n only: other line separators may stand inside JSON text.
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if number == 1:
                raw = raw.removeprefix(b"\xef\xbb\xbf")
            raw = raw.strip(b" \t\r\n")
            if not raw:
                continue
            origin = f"{path}:{number}"
            try:
                row = json.loads(raw.decode("utf-8"))
            except UnicodeDecodeError as exc:
                on_bad(origin, f"not UTF-8 (byte {exc.object[exc.start]:#04x} at position {exc.start})")
            except json.JSONDecodeError as exc:
                on_bad(origin, f"not valid JSON: {exc.msg} at column {exc.colno}")
            except (ValueError, RecursionError) as exc:
                on_bad(origin, unreadable_json(exc))
            else:
                if isinstance(row, dict):
                    yield origin, row
                else:
                    on_bad(origin, f"a row must be a JSON object, got {_shown(row)}")


def _read_json(path: Path, on_bad: OnBad) -> Iterator[tuple[str, Row]]:
    text = _text(path)
    if text.lstrip().startswith("["):
        rows = _list_items(path, text, on_bad)
    else:
        try:
            data = json.loads(text)
        except json.JSONDecodeError as exc:
            if exc.msg == "Extra data":  # JSON Lines under the name .json
                yield from _read_jsonl(path, on_bad)
                return
            raise DataError(f"{path}:{exc.lineno}: not valid JSON: {exc.msg} at column {exc.colno}") from exc
        except (ValueError, RecursionError) as exc:
            end = _end_of_value(text, len(text) - len(text.lstrip()))
            if end is not None and text[end:].strip():  # JSON Lines again
                yield from _read_jsonl(path, on_bad)
                return
            raise DataError(f"{path}: {unreadable_json(exc)}") from exc
        if not isinstance(data, dict) or not isinstance(data.get("data"), list):
            raise DataError(f'{path}: a JSON file must hold a list of rows, or an object {{"data": [rows]}}; got {_shown(data)}')
        rows = ((f"{path}[{i}]", row) for i, row in enumerate(data["data"]))
    for origin, row in rows:
        if isinstance(row, dict):
            yield origin, row
        else:
            on_bad(origin, f"a row must be a JSON object, got {_shown(row)}")


def _list_items(path: Path, text: str, on_bad: OnBad) -> Iterator[tuple[str, Any]]:
    """Items of a top-level JSON list with the line on which each starts."""
    decoder = json.JSONDecoder()
    position, line, expect_comma = text.index("[") + 1, 1, False
    counted = 0
    while True:
        while position < len(text) and text[position] in " \t\r\n":
            position += 1
        line, counted = line + text.count("\n", counted, position), position
        if position == len(text):
            raise DataError(f"{path}:{line}: not valid JSON: the list is not closed")
        if text[position] == "]":
            if text[position + 1 :].strip():
                raise DataError(f"{path}:{line}: not valid JSON: text after the end of the list")
            return
        if expect_comma:
            if text[position] != ",":
                raise DataError(f"{path}:{line}: not valid JSON: ',' expected between two rows")
            position, expect_comma = position + 1, False
            continue
        try:
            item, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError as exc:
            raise DataError(f"{path}:{exc.lineno}: not valid JSON: {exc.msg} at column {exc.colno}") from exc
        except (ValueError, RecursionError) as exc:
            on_bad(f"{path}:{line}", unreadable_json(exc))
            end = _end_of_value(text, position)
            if end is None:
                raise DataError(f"{path}:{line}: not valid JSON: the row is not closed") from exc
            position = end
        else:
            yield f"{path}:{line}", item
        expect_comma = True


_STRING_OR_BRACKET = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}]', re.DOTALL)
_NUMBER = re.compile(r"[-+.\w]+")


def _end_of_value(text: str, start: int) -> int | None:
    """Where the JSON list, object or number at ``start`` ends; found without reading it, as json cannot. None: nowhere."""
    if text[start] not in "[{":
        return _NUMBER.match(text, start).end()
    depth = 0
    for match in _STRING_OR_BRACKET.finditer(text, start):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return match.end()
    return None


def _read_csv(path: Path, on_bad: OnBad) -> Iterator[tuple[str, Row]]:
    csv.field_size_limit(2**31 - 1)
    with path.open(encoding="utf-8-sig", newline="") as file:
        lines = csv.reader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", strict=True)
        try:
            header = next(lines, None)
            if not header:
                raise DataError(f"{path}:1: no header line with column names")
            for i, name in enumerate(header):
                if name in header[:i]:
                    raise DataError(f"{path}:1: the column {name!r} stands twice in the header")
            number = lines.line_num + 1
            for values in lines:
                origin, number = f"{path}:{number}", lines.line_num + 1
                if not values:
                    continue
                if len(values) == len(header):
                    yield origin, dict(zip(header, values, strict=True))
                else:
                    on_bad(origin, f"{len(values)} fields, but the header has {len(header)}")
        except UnicodeDecodeError:
            _text(path)  # raises, with the line: the reader is behind the decoder, which takes blocks
            raise
        except csv.Error as exc:
            raise DataError(f"{path}:{lines.line_num + 1}: {exc}") from exc


def _read_parquet(path: Path, on_bad: OnBad) -> Iterator[tuple[str, Row]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            index = 0
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    yield f"{path}[{index}]", row
                    index += 1
    except (pyarrow.ArrowException, ValueError, OSError) as exc:
        raise DataError(f"{path}: not a readable Parquet file: {exc}") from exc


def _text(path: Path) -> str:
    raw = path.read_bytes()
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        line = exc.object.count(b"\n", 0, exc.start) + 1  # exc.object is without the byte order mark
        raise DataError(f"{path}:{line}: not UTF-8 (byte {exc.object[exc.start]:#04x})") from exc


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


_READERS = {
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_parquet,
}
_COMPRESSED = {".gz", ".zip", ".zst", ".bz2", ".xz", ".tar", ".tgz"}
