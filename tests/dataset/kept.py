"""What the tests of encoded rows on disk share."""

import json
from pathlib import Path

import pytest
from chat_styles import make_tokenizer

from twinkle_research.dataset import Dataset, DatasetMeta, EncodedCache
from twinkle_research.template import Template


def template(cls: type[Template] = Template, style: str = "chatml", **options: object) -> Template:
    return cls(tokenizer=make_tokenizer(style), **options)


def write(path: Path, count: int = 20, answer: str = "answer {{NAME}}") -> Path:
    path.write_text("".join(json.dumps({"prompt": f"question {i}", "completion": f"{answer} {i}"}) + "\n" for i in range(count)))
    return path


def load(path: Path, root: Path, made: Template | None = None, processors=(), on_error="raise", limit=None, **cache) -> Dataset:
    meta = DatasetMeta(str(path), data_slice=limit and range(limit))
    kept = EncodedCache(root, **cache)
    return Dataset.encoded_from(meta, made or template(), processors=processors, on_error=on_error, cache=kept)


def shout(row: dict) -> dict:
    """Somebody's own processor."""
    return {**row, "completion": row["completion"].upper()}


def folders(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.is_dir())


def encodes(caplog: pytest.LogCaptureFixture) -> int:
    """How often rows were encoded since the last time that this was asked."""
    count = sum("encoding rows" in record.getMessage() for record in caplog.records)
    caplog.clear()
    return count
