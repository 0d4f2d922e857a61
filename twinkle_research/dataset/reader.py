"""Local files to rows, each with its origin, "file:line" (physical, from 1) or "file[index]" (from 0).

Rows stay Python objects. Columnar inference would force one type on a key (a tool argument that is text in one row
and a number in the next) and give every row the keys of all.
"""

from __future__ import annotations

import csv
import difflib
import json
import os
from collections.abc import Iterator
from pathlib import Path

from twinkle_research.dataset.json_reader import is_json_lines, raise_not_utf8, read_json, shown
from twinkle_research.dataset.rows import OnBad, Origin, Row, raise_bad_row
from twinkle_research.errors import DataError
from twinkle_research.template.messages import unreadable_json


def read_path(path: str | Path, on_bad: OnBad = raise_bad_row) -> Iterator[tuple[Origin, Row]]:
    """Rows of a JSONL, JSON, CSV, TSV or Parquet file, or of all such files of a folder in the order of their names.

    Files are read as the rows are asked for: what is held at a time does not grow with a file.
    """
    for file in data_files(Path(path).expanduser()):
        yield from read_file(file, on_bad)


def read_file(file: Path, on_bad: OnBad = raise_bad_row) -> Iterator[tuple[Origin, Row]]:
    return _READERS[file.suffix.lower()](file, on_bad)


def data_files(path: Path) -> list[Path]:
    """The files that ``path`` stands for. DataError where there are none."""
    known = ", ".join(_READERS)
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if _why_unread(file) is None)
        if not files:
            others = unread(path)
            raise DataError(
                f"{path}: no data files in the folder (looked for {known})" + (f"; not read: {others}" if others else "")
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


def unread(folder: Path) -> str:
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
    # By the names without their endings: all JSONL files are alike in that.
    others = {f.name: f.stem for f in folder.iterdir()}
    close = difflib.get_close_matches(path.stem, others.values(), n=1, cutoff=0.6)
    found = sorted((name for name in others if close and others[name] == close[0]), key=lambda name: name[-1:] != path.name[-1:])
    return f"; did you mean '{folder / found[0]}'?" if found else ""


def _read_jsonl(path: Path, on_bad: OnBad) -> Iterator[tuple[Origin, Row]]:
    # Binary iteration splits at \n only: other line separators may stand inside JSON text.
    name = str(path)
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if number == 1:
                raw = raw.removeprefix(b"\xef\xbb\xbf")
            raw = raw.strip(b" \t\r\n")
            if not raw:
                continue
            origin = Origin(name, number, is_line=True)
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
                    on_bad(origin, f"a row must be a JSON object, got {shown(row)}")


def _read_json(path: Path, on_bad: OnBad) -> Iterator[tuple[Origin, Row]]:
    return _read_jsonl(path, on_bad) if is_json_lines(path) else read_json(path, on_bad)


def _read_csv(path: Path, on_bad: OnBad) -> Iterator[tuple[Origin, Row]]:
    """An empty cell is null, as an absent value is in the other formats: a file cannot say whether it means no text."""
    csv.field_size_limit(2**31 - 1)
    with path.open(encoding="utf-8-sig", newline="") as file:
        lines = csv.reader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", strict=True)
        try:
            header = next(lines, None)
            if not header:
                raise DataError(f"{path}:1: no header line with column names")
            other = next((c for c in ",;\t|" if len(header) == 1 and c in header[0]), None)
            if other is not None:
                raise DataError(
                    f"{path}:1: the header is one column, {header[0]!r}: fields seem to be separated by {other!r}, but a "
                    f"{path.suffix} file has {lines.dialect.delimiter!r} there"
                )
            for i, name in enumerate(header):
                if name in header[:i]:
                    raise DataError(f"{path}:1: the column {name!r} stands twice in the header")
            number = lines.line_num + 1
            for values in lines:
                origin, number = Origin(str(path), number, is_line=True), lines.line_num + 1
                if not values:
                    continue
                if len(values) == len(header):
                    yield origin, {name: value or None for name, value in zip(header, values, strict=True)}
                else:
                    on_bad(origin, f"{len(values)} fields, but the header has {len(header)}")
        except UnicodeDecodeError:
            raise_not_utf8(path)
        except csv.Error as exc:
            raise DataError(f"{path}:{lines.line_num + 1}: {exc}") from exc


def _read_parquet(path: Path, on_bad: OnBad) -> Iterator[tuple[Origin, Row]]:
    import pyarrow
    import pyarrow.parquet

    try:
        # Without a buffer size a whole column of a row group is read at once.
        with pyarrow.parquet.ParquetFile(path, buffer_size=1 << 20) as file:
            index = 0
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    yield Origin(str(path), index), row
                    index += 1
    except (pyarrow.ArrowException, ValueError, OSError) as exc:
        raise DataError(f"{path}: not a readable Parquet file: {exc}") from exc


_READERS = {
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_parquet,
}
_COMPRESSED = {".gz", ".zip", ".zst", ".bz2", ".xz", ".tar", ".tgz"}
