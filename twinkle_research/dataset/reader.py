"""Local files to rows. Each row comes with its origin, "file:line" (physical, from 1) or "file[index]" (from 0).

Rows stay Python objects. Columnar inference would force one type on a key (a tool argument that is text in one row
and a number in the next) and give every row the keys of all.
"""

from __future__ import annotations

import csv
import difflib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from twinkle_research.errors import DataError

Row = dict[str, Any]
OnBad = Callable[[str, str], None]  # (origin, reason); raises, or notes the row as skipped


def raise_bad_row(origin: str, reason: str) -> None:
    raise DataError(f"{origin}: {reason}")


def read_path(path: str | Path, on_bad: OnBad = raise_bad_row) -> Iterator[tuple[str, Row]]:
    """Rows of a JSONL, JSON, CSV, TSV or Parquet file, or of all such files of a folder in the order of their names."""
    path = Path(path).expanduser()
    for file in data_files(path):
        yield from _READERS[file.suffix.lower()](file, on_bad)


def data_files(path: Path) -> list[Path]:
    """The files that ``path`` stands for. DataError where there are none."""
    known = ", ".join(_READERS)
    if path.is_dir():
        files = sorted(f for f in path.iterdir() if f.is_file() and f.suffix.lower() in _READERS and not f.name.startswith("."))
        if not files:
            raise DataError(f"{path}: no data files in the folder (looked for {known})")
        return files
    if not path.exists():
        raise DataError(f"{path}: no such file{_similar(path)}")
    if path.suffix.lower() not in _READERS:
        raise DataError(f"{path}: unknown file type {path.suffix!r}; readable: {known}")
    return [path]


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
            except RecursionError:
                on_bad(origin, "JSON is nested too deeply")
            else:
                if isinstance(row, dict):
                    yield origin, row
                else:
                    on_bad(origin, f"a row must be a JSON object, got {_shown(row)}")


def _read_json(path: Path, on_bad: OnBad) -> Iterator[tuple[str, Row]]:
    text = _text(path)
    if text.lstrip().startswith("["):
        rows = _list_items(path, text)
    else:
        try:
            data = json.loads(text)
        except json.JSONDecodeError as exc:
            if exc.msg == "Extra data":  # JSON Lines under the name .json
                yield from _read_jsonl(path, on_bad)
                return
            raise DataError(f"{path}:{exc.lineno}: not valid JSON: {exc.msg} at column {exc.colno}") from exc
        if not isinstance(data, dict) or not isinstance(data.get("data"), list):
            raise DataError(f'{path}: a JSON file must hold a list of rows, or an object {{"data": [rows]}}; got {_shown(data)}')
        rows = ((f"{path}[{i}]", row) for i, row in enumerate(data["data"]))
    for origin, row in rows:
        if isinstance(row, dict):
            yield origin, row
        else:
            on_bad(origin, f"a row must be a JSON object, got {_shown(row)}")


def _list_items(path: Path, text: str) -> Iterator[tuple[str, Any]]:
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
        yield f"{path}:{line}", item
        expect_comma = True


def _read_csv(path: Path, on_bad: OnBad) -> Iterator[tuple[str, Row]]:
    csv.field_size_limit(2**31 - 1)
    with path.open(encoding="utf-8-sig", newline="") as file:
        lines = csv.reader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", strict=True)
        try:
            header = next(lines, None)
            if not header:
                raise DataError(f"{path}:1: no header line with column names")
            number = lines.line_num + 1
            for values in lines:
                origin, number = f"{path}:{number}", lines.line_num + 1
                if not values:
                    continue
                if len(values) == len(header):
                    yield origin, dict(zip(header, values, strict=True))
                else:
                    on_bad(origin, f"{len(values)} fields, but the header has {len(header)}")
        except (csv.Error, UnicodeDecodeError) as exc:
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
    except pyarrow.ArrowInvalid as exc:
        raise DataError(f"{path}: not a readable Parquet file: {exc}") from exc


def _text(path: Path) -> str:
    raw = path.read_bytes()
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        line = raw.count(b"\n", 0, exc.start) + 1
        raise DataError(f"{path}:{line}: not UTF-8 (byte {raw[exc.start]:#04x})") from exc


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
