"""The reader of ``.wandb`` files on files written here, so that every border of a block and every torn tail occurs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from twinkle_research.tracking.wandb_log import BLOCK_BYTES, FRAGMENT, HEADER_BYTES, read_history, recorded_rows

wandb_internal_pb2 = pytest.importorskip("wandb.proto.wandb_internal_pb2")


def record(step: int, size: int) -> bytes:
    """A history record of exactly ``size`` bytes or a few more."""
    row = wandb_internal_pb2.Record()
    for key, value in (("step", step), ("text", "x" * max(0, size - 60))):
        item = row.history.item.add()
        item.nested_key.append(key)
        item.value_json = json.dumps(value)
    return row.SerializeToString()


def write(path: Path, records: list[bytes]) -> bytes:
    """LevelDB's log format, the checksums left 0."""
    out = bytearray(b":W&B\x00\x00\x00"[:HEADER_BYTES])
    for data in records:
        first = True
        while True:
            left = BLOCK_BYTES - len(out) % BLOCK_BYTES
            if left < FRAGMENT.size:
                out += bytes(left)
                continue
            part, data = data[: left - FRAGMENT.size], data[left - FRAGMENT.size :]
            kind = {(True, True): 1, (True, False): 2, (False, False): 3, (False, True): 4}[first, not data]
            out += FRAGMENT.pack(0, len(part), kind) + part
            first = False
            if not data:
                break
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(out)
    return bytes(out)


@pytest.mark.parametrize("end", range(-9, 3))
def test_records_around_the_end_of_a_block(tmp_path, end):
    """The first record ends ``end`` bytes from the border, the third spans several blocks."""
    path = tmp_path / "a.wandb"
    size = BLOCK_BYTES - HEADER_BYTES - FRAGMENT.size + end
    size += size - len(record(1, size))
    write(path, [record(1, size), record(2, 100), record(3, 3 * BLOCK_BYTES), record(4, 100)])
    assert [row["step"] for row in read_history(path)] == [1, 2, 3, 4]


def test_a_torn_tail_loses_only_what_is_torn(tmp_path):
    path = tmp_path / "a.wandb"
    records = [record(step, 90) for step in range(5)]
    data = write(path, records)
    for size in range(len(data) + 1):
        path.write_bytes(data[:size])
        steps = [row["step"] for row in read_history(path)]
        assert steps == list(range(len(steps))) and len(steps) >= 5 * (size - HEADER_BYTES) // (len(data) - HEADER_BYTES) - 1
    path.write_bytes(data + bytes(500))  # a file that was made longer before it was written
    assert [row["step"] for row in read_history(path)] == [0, 1, 2, 3, 4]


def test_the_newest_attempt_wins_and_other_runs_do_not_count(tmp_path):
    write(tmp_path / "offline-run-20260101_000000-id" / "run-id.wandb", [record(1, 61), record(2, 61)])
    write(tmp_path / "run-20260102_000000-id" / "run-id.wandb", [record(2, 63)])
    write(tmp_path / "offline-run-20260103_000000-no" / "run-no.wandb", [record(3, 61)])
    rows = recorded_rows(tmp_path, "id")
    assert {step: row["text"] for step, row in rows.items()} == {1: "x", 2: "xxx"}
    assert recorded_rows(tmp_path, "id", after=1) == {1: {}, 2: {"step": 2, "text": "xxx"}}
