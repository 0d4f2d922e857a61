"""Encoded rows on disk and several processes: one encodes, the others wait; a killed one leaves nothing half."""

import logging
import os
import signal
from pathlib import Path

import pytest
from children import children_of, fork, is_running, wait, wait_until
from kept import encodes, folders, load, shout, template, write

from twinkle_research.dataset import Dataset, DatasetMeta, EncodedCache
from twinkle_research.dataset.encoding import EncodeOptions
from twinkle_research.dataset.preprocessor import SelfCognitionProcessor
from twinkle_research.dataset.rows import Processor


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "encoded"


@pytest.fixture(autouse=True)
def logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def test_of_many_processes_one_encodes(tmp_path, root) -> None:
    path = write(tmp_path / "rows.jsonl", 1500)

    def child(number: int) -> None:
        logging.getLogger("twinkle_research").addHandler(logging.FileHandler(tmp_path / f"{number}.log"))
        logging.getLogger("twinkle_research").setLevel(logging.INFO)
        data = load(path, root)
        (tmp_path / f"{number}.txt").write_text(f"{data.fingerprint} {data[1499]['row']}")

    pids = [fork(lambda number=number: child(number)) for number in range(4)]
    assert [wait(pid) for pid in pids] == [0] * 4
    assert sum((tmp_path / f"{number}.log").read_text().count("encoding rows") for number in range(4)) == 1
    results = {(tmp_path / f"{number}.txt").read_text() for number in range(4)}
    assert len(results) == 1 and len(folders(root)) == 1
    assert results == {f"{load(path, root).fingerprint} {path}:1500"}


def test_killed_while_encoding(tmp_path, root, caplog) -> None:
    """SIGKILL leaves no folder under its final name and no worker process; the next start encodes again."""
    path = write(tmp_path / "rows.jsonl", 6000)

    def child() -> None:
        options = EncodeOptions(num_proc=2)
        Dataset.encoded_from(DatasetMeta(str(path)), template(), options=options, cache=EncodedCache(root))

    pid = fork(child)
    wait_until(lambda: any(file.stat().st_size > 0 for file in root.glob("*.tmp/ids.bin")))
    workers = children_of(pid)
    assert len(workers) >= 2
    os.kill(pid, signal.SIGKILL)
    assert wait(pid) == -signal.SIGKILL
    left = folders(root)
    assert len(left) == 1 and left[0].endswith(".tmp")
    wait_until(lambda: not any(map(is_running, workers)))
    data = load(path, root)
    assert encodes(caplog) == 1 and len(data) == 6000
    assert folders(root) == [left[0].removesuffix(".tmp")]


def test_ranks_of_a_run_share_what_is_not_kept(tmp_path, root, caplog) -> None:
    path = write(tmp_path / "rows.jsonl")
    caches = [
        EncodedCache(root, session="run1"),
        EncodedCache(root, session="run1", first=False),
        EncodedCache(root, session="run2"),
    ]
    loaded = []
    for cache in caches:
        for processor in (Processor(shout), Processor(SelfCognitionProcessor("x"))):  # training and held-out rows, say
            loaded.append(Dataset.encoded_from(DatasetMeta(str(path)), template(), processors=[processor], cache=cache))
    # An instance of our own class is code too: nothing says what it was made with.
    assert encodes(caplog) == 4 and len(folders(root)) == 4
    caches[0].release()
    caches[1].release()
    assert [name.split("-")[1] for name in folders(root)] == ["run2", "run2"]
    caches[2].release()
    assert list(root.iterdir()) == []
    assert list(loaded[0]) == list(loaded[2]) == list(loaded[4]) != list(loaded[1])


def test_folders_of_killed_runs_are_deleted_after_a_day(tmp_path, root) -> None:
    path = write(tmp_path / "rows.jsonl")
    root.mkdir()
    for name, age in (("run-old-0", 90_000), ("run-new-0", 60)):
        (root / name).mkdir()
        (root / f"{name}.tmp").mkdir()
        (root / f"{name}.lock").write_text("")
        os.utime(root / f"{name}.lock", (os.stat(root).st_mtime - age,) * 2)
    load(path, root)
    assert [name for name in folders(root) if name.startswith("run-")] == ["run-new-0", "run-new-0.tmp"]
