"""Real data sets, where $TWINKLE_DATA names a folder that holds them."""

import os
from pathlib import Path

import pytest
from chat_styles import make_tokenizer

from twinkle_research.data_format import IGNORE_INDEX
from twinkle_research.dataset import Dataset, DatasetMeta
from twinkle_research.template import Template


def source(name: str) -> str:
    folder = os.environ.get("TWINKLE_DATA")
    if not folder or not (Path(folder) / name).exists():
        pytest.skip(f"needs {name} in the folder named by TWINKLE_DATA")
    return str(Path(folder) / name)


def encode(name: str, *, processor: str | None = None, style: str = "chatml", limit: int | None = None) -> Dataset:
    rows = Dataset(DatasetMeta(source(name), data_slice=None if limit is None else range(limit)))
    if processor:
        rows.map(processor)
    return rows.set_template(Template(tokenizer=make_tokenizer(style), max_length=None)).encode()


def trained_text(rows: Dataset, index: int) -> str:
    return "|".join(text for text, trained in rows.template.trained_spans(rows[index]) if trained)


def test_questions_and_answers() -> None:
    rows = encode("gsm8k/train.jsonl", limit=500)
    assert len(rows) == 500 and not rows.dropped
    assert trained_text(rows, 0).endswith("#### 72<|end|>")
    assert rows[499]["row"].endswith("train.jsonl:500")


def test_identity_rows_of_others() -> None:
    for name in ("swift/self_cognition.jsonl", "llamafactory/identity.json"):
        rows = encode(name, processor="SelfCognitionProcessor")
        text = " ".join(trained_text(rows, i) for i in range(len(rows)))
        assert "Tansy" in text and "{{" not in text


@pytest.mark.parametrize("style", ["chatml", "headers", "thinking"])
def test_conversations_with_tools(style: str) -> None:
    rows = encode("llamafactory/glaive_toolcall_en_demo.json", style=style, limit=150)
    assert not rows.dropped
    calls = sum(trained_text(rows, i).count('{"name": ') for i in range(len(rows)))
    raw = Dataset(DatasetMeta(source("llamafactory/glaive_toolcall_en_demo.json"), data_slice=range(150)))
    assert calls == sum(m["from"] == "function_call" for row in raw for m in row["conversations"])
    assert all(any(label != IGNORE_INDEX for label in feature["labels"]) for feature in rows)
