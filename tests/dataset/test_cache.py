"""Encoded rows on disk: which changes make them anew, what is kept, what is deleted, and what a damaged folder does."""

import inspect
import json
import logging
import os
import shutil
from pathlib import Path

import pytest
from chat_styles import make_tokenizer
from kept import encodes, folders, load, shout, template, write

from twinkle_research.dataset import Dataset, DatasetMeta, EncodedCache, key
from twinkle_research.dataset.encoding import EncodeOptions
from twinkle_research.dataset.key import template_settings
from twinkle_research.dataset.rows import Processor
from twinkle_research.errors import DataError, UserError
from twinkle_research.template import Qwen3_5Template, Template


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "encoded"


@pytest.fixture(autouse=True)
def logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


# --- what is the same, and what is not ------------------------------------------------------------------------------


def test_nothing_is_encoded_twice(tmp_path, root, caplog) -> None:
    path = write(tmp_path / "rows.jsonl")
    first = load(path, root)
    assert encodes(caplog) == 1 and len(folders(root)) == 1
    again = load(path, root)
    assert encodes(caplog) == 0
    assert list(again) == list(first) and again.fingerprint == first.fingerprint and again.origins == first.origins


def test_names_times_and_processes_do_not_count(tmp_path, root, caplog) -> None:
    path = write(tmp_path / "rows.jsonl")
    first = load(path, root)
    encodes(caplog)
    os.utime(path, (1, 1))
    load(path, root)
    path.rename(tmp_path / "renamed.jsonl")
    renamed = load(tmp_path / "renamed.jsonl", root)
    used = template()
    used.encode({"prompt": "a", "completion": "b"})  # a tokenizer that has worked is the same tokenizer
    Dataset.encoded_from(
        DatasetMeta(str(tmp_path / "renamed.jsonl")),
        used,
        options=EncodeOptions(num_proc=2, batched=False),
        cache=EncodedCache(root),
    )
    assert encodes(caplog) == 0
    # Rows are named by the file as it is called now.
    assert first[3]["row"] == f"{path}:4" and renamed[3]["row"] == f"{tmp_path}/renamed.jsonl:4"
    assert {**renamed[3], "row": ""} == {**first[3], "row": ""}


def test_changed_content_of_the_same_size_and_time(tmp_path, root, caplog) -> None:
    path = write(tmp_path / "rows.jsonl")
    before, stat = load(path, root), path.stat()
    text = path.read_text()
    path.write_text(text.replace("question 7", "question 8", 1))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    after = load(path, root)
    assert encodes(caplog) == 2 and after.fingerprint != before.fingerprint and after[7] != before[7]
    path.write_text(text)
    assert load(path, root).fingerprint == before.fingerprint and encodes(caplog) == 0


def other_chat_template() -> Template:
    made = make_tokenizer("chatml")
    made.chat_template = made.chat_template.replace("\\n", "\\n\\n", 1)
    return Template(tokenizer=made)


def with_token() -> Template:
    made = make_tokenizer("chatml")
    made.add_tokens(["question"])
    return Template(tokenizer=made)


def with_special_token() -> Template:
    made = make_tokenizer("chatml")
    made.eos_token = "<|start|>"
    return Template(tokenizer=made)


TEMPLATES = {
    "max_length": lambda: template(max_length=64),
    "truncation": lambda: template(truncation_strategy="left"),
    "default_system": lambda: template(default_system="Be brief."),
    "train_on": lambda: template(train_on="all"),
    "enable_thinking": lambda: template(enable_thinking=False),
    "class": lambda: template(Qwen3_5Template),
    "chat template": other_chat_template,
    "style": lambda: template(style="headers"),
    "vocabulary": with_token,
    "special token": with_special_token,
}


@pytest.mark.parametrize("change", TEMPLATES)
def test_another_template_or_tokenizer_is_another_data_set(tmp_path, root, caplog, change: str) -> None:
    path = write(tmp_path / "rows.jsonl")
    load(path, root)
    changed = load(path, root, TEMPLATES[change]())
    assert encodes(caplog) == 2
    expected = TEMPLATES[change]().batch_encode(
        [{"prompt": f"question {i}", "completion": f"answer {{{{NAME}}}} {i}"} for i in range(20)]
    )
    assert [{k: v for k, v in feature.items() if k != "row"} for feature in changed] == expected
    load(path, root)
    load(path, root, TEMPLATES[change]())
    assert encodes(caplog) == 0


def test_every_setting_of_a_template_counts() -> None:
    settings = template_settings(template(max_length=99))
    named = set(inspect.signature(Template).parameters) - {"model_id", "tokenizer", "revision", "trust_remote_code"}
    assert set(settings["settings"]) == named and settings["settings"]["max_length"] == 99
    json.dumps(settings)


def test_another_processor_limit_or_code_is_another_data_set(tmp_path, root, caplog, monkeypatch) -> None:
    path = write(tmp_path / "rows.jsonl")
    variants = [
        {},
        {"processors": [Processor("SelfCognitionProcessor")]},
        {"processors": [Processor("SelfCognitionProcessor", {"model_name": "Other"})]},
        {"limit": 10},
        {"on_error": "skip"},
    ]
    loaded = [load(path, root, **variant) for variant in variants]
    assert encodes(caplog) == len(variants)
    assert len({data.fingerprint for data in loaded}) == len(variants) - 1  # nothing to skip here: the same rows
    assert "Tansy" in loaded[0].template.decode(loaded[1][0]["input_ids"])
    assert [load(path, root, **variant).fingerprint for variant in variants] == [data.fingerprint for data in loaded]
    assert encodes(caplog) == 0
    # Another version of the code that makes tokens.
    monkeypatch.setattr(key, "code_digest", lambda: "another")
    load(path, root)
    assert encodes(caplog) == 1


def test_each_file_of_a_folder_counts(tmp_path, root, caplog) -> None:
    rows = tmp_path / "rows"
    rows.mkdir()
    write(rows / "a.jsonl", 3)
    write(rows / "b.jsonl", 4)
    load(rows, root)
    write(rows / "c.jsonl", 1)
    assert len(load(rows, root)) == 8
    (rows / "a.jsonl").rename(rows / "d.jsonl")  # another order
    assert load(rows, root)[0]["row"] == f"{rows}/b.jsonl:1"
    assert encodes(caplog) == 3


# --- code of the user's ---------------------------------------------------------------------------------------------


class OwnTemplate(Template):
    """Somebody's own class."""


@pytest.mark.parametrize("own", ["processor", "template", "tokenizer", "switched off"])
def test_what_cannot_be_known_is_not_kept(tmp_path, root, caplog, own: str) -> None:
    path = write(tmp_path / "rows.jsonl")
    options: dict = {"processors": [Processor(shout)]} if own == "processor" else {}
    made = template(OwnTemplate) if own == "template" else template()
    if own == "tokenizer":
        made.tokenizer = type("RemoteTokenizer", (type(made.tokenizer),), {})(tokenizer_object=made.tokenizer.backend_tokenizer)
    for _ in range(2):
        data = load(path, root, made, keep=own != "switched off", **options)
        assert list(root.iterdir()) == []  # deleted as soon as it is mapped
        assert len(data) == 20 and data[19]["row"] == f"{path}:20"
        assert ("ANSWER" in made.decode(data[0]["input_ids"])) == (own == "processor")
    assert encodes(caplog) == 2


# --- damage, and what goes wrong ------------------------------------------------------------------------------------


def cut_ids(folder: Path) -> None:
    os.truncate(folder / "ids.bin", 8)


def turn_a_bit(folder: Path, name: str) -> None:
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / name).write_bytes(content)


DAMAGE = {
    "ids.bin has 8 bytes instead of": cut_ids,
    "bounds.bin is not what was written": lambda folder: turn_a_bit(folder, "bounds.bin"),
    "numbers.bin is not what was written": lambda folder: turn_a_bit(folder, "numbers.bin"),
    "header.json is not what was written|header.json cannot be read": lambda folder: turn_a_bit(folder, "header.json"),
    "header.json cannot be read": lambda folder: (folder / "header.json").write_text("[1]"),
    "No such file": lambda folder: (folder / "trained.bin").unlink(),
    "dropped.jsonl is not what was written": lambda folder: turn_a_bit(folder, "dropped.jsonl"),
    "checks.bin is not what was written": lambda folder: turn_a_bit(folder, "checks.bin"),
    "dropped.jsonl is not what was": lambda folder: os.truncate(folder / "dropped.jsonl", 3),
}


@pytest.mark.parametrize("reason", DAMAGE)
def test_a_damaged_folder_is_noticed_and_made_again(tmp_path, root, caplog, reason: str) -> None:
    path = write(tmp_path / "rows.jsonl")
    path.write_text(path.read_text() + "{broken\n")
    whole = load(path, root, on_error="skip")
    expected, dropped = list(whole), list(whole.dropped)
    DAMAGE[reason](root / folders(root)[0])
    encodes(caplog)
    again = load(path, root, on_error="skip")
    said = [record.getMessage() for record in caplog.records if "are damaged" in record.getMessage()]
    assert said and any(part in said[0] for part in reason.split("|")) and encodes(caplog) == 1
    assert list(again) == expected and list(again.dropped) == dropped
    load(path, root, on_error="skip")
    assert "are damaged" not in caplog.text and encodes(caplog) == 0


@pytest.mark.parametrize("name", ["ids.bin", "trained.bin"])
def test_tokens_that_are_damaged_are_noticed_when_they_are_used(tmp_path, root, caplog, name: str) -> None:
    """Reading all of them at each start would cost too much."""
    path = write(tmp_path / "rows.jsonl")
    whole = list(load(path, root))
    folder = root / folders(root)[0]
    turn_a_bit(folder, name)
    data = load(path, root)
    with pytest.raises(DataError, match=rf"rows.jsonl:\d+: its encoded row in {folder} is damaged") as caught:
        list(data)
    number = int(str(caught.value).removeprefix(f"{path}:").split(":")[0]) - 1
    assert [data[i] for i in range(20) if i != number] == [feature for i, feature in enumerate(whole) if i != number]
    shutil.rmtree(folder)
    encodes(caplog)
    assert list(load(path, root)) == whole and encodes(caplog) == 1


def test_a_file_that_is_cut_while_it_is_in_use(tmp_path, root) -> None:
    data = load(write(tmp_path / "rows.jsonl"), root)
    cut_ids(root / folders(root)[0])
    with pytest.raises(DataError, match="ids.bin: ends too early; it was cut while it was in use"):
        data[19]


def test_warnings_are_part_of_what_is_kept(tmp_path, root, caplog) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": "q", "completion": "a"}, {"prompt": "q"}, {"prompt": "q", "completion": "a " * 50}]
    path.write_text("\n".join([*map(json.dumps, rows), "{broken"]))
    short = template(max_length=32, truncation_strategy="right")
    broken = "not valid JSON: Expecting property name enclosed in double quotes at column 2"
    expected = [
        f"{path}: reading dropped 1 rows (of 4): 1 {broken} ({path}:4)",
        f"{path}: encoding dropped 1 rows (of 3): 1 'prompt' without 'completion' ({path}:2)",
        f"{path}: encoding cut (right) 1 rows (of 3) longer than max_length=32: {path}:3",
    ]
    for _ in range(2):
        caplog.clear()
        data = load(path, root, short, on_error="skip")
        assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == expected
        assert {(d.row, d.reason) for d in data.dropped} == {
            (f"{path}:4", broken),
            (f"{path}:2", "'prompt' without 'completion'"),
        }
        assert len(data.dropped) == 2 and data.dropped[1] == list(data.dropped)[1]
    assert encodes(caplog) == 0


def test_bad_rows_leave_nothing(tmp_path, root) -> None:
    path = write(tmp_path / "rows.jsonl")
    path.write_text(path.read_text() + '{"messages": []}\n')
    with pytest.raises(DataError, match=f"{path}:21: 'messages' is empty"):
        load(path, root)
    assert folders(root) == []
    path.write_text("")
    with pytest.raises(DataError, match="rows.jsonl: no rows after reading"):
        load(path, root)
    write(path, 3)
    with pytest.raises(DataError, match="none of 3 rows can be trained on: 3 longer than max_length=4"):
        load(path, root, template(max_length=4, truncation_strategy="delete"))
    with pytest.raises(DataError, match="no rows after shut: 3 left out by shut"):
        load(path, root, processors=[Processor(shut)])
    assert folders(root) == []


def shut(row: dict) -> None:
    return None


def test_a_file_that_changes_while_it_is_encoded(tmp_path, root) -> None:
    path, made = write(tmp_path / "rows.jsonl"), template()
    encode = made.encode_rows

    def change_and_encode(*args: object) -> object:
        write(path, answer="other")
        return encode(*args)

    made.encode_rows = change_and_encode
    with pytest.raises(DataError, match="was changed while it was encoded"):
        load(path, root, made)
    assert folders(root) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path, root) -> None:
    import resource

    path = write(tmp_path / "rows.jsonl")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write encoded rows to .*file.*; data.cache_dir, or the environment variable"):
        load(path, tmp_path / "file")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # as a full disk
    try:
        with pytest.raises(UserError, match=r"cannot write encoded rows to .*encoded: File too large"):
            load(path, root)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert folders(root) == []
    assert len(load(path, root)) == 20


def test_size(tmp_path, root) -> None:
    assert EncodedCache(root).size() == (0, 0)
    load(write(tmp_path / "a.jsonl"), root)
    load(write(tmp_path / "b.jsonl", 5), root)
    count, size = EncodedCache(root).size()
    assert count == 2 and size == sum(file.stat().st_size for name in folders(root) for file in (root / name).iterdir())
