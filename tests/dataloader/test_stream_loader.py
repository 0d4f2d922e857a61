"""StreamLoader: S23 (position, order and world size) for features that are made while they are used."""

import json
from pathlib import Path

import pytest
from chat_styles import make_tokenizer

from twinkle_research.dataloader import StreamLoader
from twinkle_research.dataset import DatasetMeta, IterableDataset
from twinkle_research.errors import ConfigError, DataError
from twinkle_research.template import Template


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """23 rows of different lengths, of which the third gives no feature, and some two."""
    rows = [{"prompt": f"question {i}", "completion": f"answer {i} " * (1 + i % 4)} for i in range(23)]
    rows[2] = {"prompt": "x"}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "rows.jsonl"


def ranks(path: Path, size: int = 1, num_proc: int = 1) -> list[StreamLoader]:
    template = Template(tokenizer=make_tokenizer("chatml"), max_length=30, truncation_strategy="split")

    def data() -> IterableDataset:
        return IterableDataset(DatasetMeta(str(path)), on_error="skip", num_proc=num_proc).set_template(template)

    return [StreamLoader(data(), batch_size=4, dp_rank=rank, dp_size=size) for rank in range(size)]


def whole_batches(loaders: list[StreamLoader], count: int) -> list[list[tuple]]:
    """The next ``count`` global batches, over the ends of passes, put together from all ranks."""
    found: list[list[tuple]] = []
    while len(found) < count:
        for parts in zip(*loaders, strict=True):
            features = sorted((f for part in parts for f in part), key=lambda f: f["sample_index"])
            assert [f["sample_index"] for f in features] == list(range(len(features)))
            assert max(map(len, parts)) - min(map(len, parts)) <= 1
            found.append([(f["row"], tuple(f["input_ids"])) for f in features])
            if len(found) == count:
                break
    assert len({str(loader.get_state()) for loader in loaders}) == 1
    return found


def test_passes(path) -> None:
    loader = ranks(path)[0]
    assert loader.steps_per_epoch is None
    first, second = list(loader), list(loader)
    features = sum(map(len, first))
    assert first == second and features > 30
    assert [len(batch) for batch in first] == [4] * (features // 4) + [features % 4] * (features % 4 > 0)
    assert loader.epoch == 2 and loader.consumed_train_samples == 2 * features
    assert loader.get_state() == {
        "consumed_train_samples": 2 * features, "stream": {"epoch": 2, "row": 0, "features": 0},
    }  # fmt: skip


@pytest.mark.parametrize("by", ["state", "number of rows"])
def test_s23_resume_at_every_step_on_other_numbers_of_ranks(path, by: str) -> None:
    loader = ranks(path)[0]
    expected, states = [], []
    for _ in range(2):
        for batch in loader:
            expected.append([(f["row"], tuple(f["input_ids"])) for f in batch])
            states.append(json.loads(json.dumps(loader.get_state())))
    for step in range(0, len(states) - 3, 2 if by == "state" else 5):
        for size in (1, 2, 3):
            resumed = ranks(path, size)
            for one in resumed:
                if by == "state":
                    one.load_state(states[step])
                else:
                    one.resume_from_checkpoint(states[step]["consumed_train_samples"])
                assert one.get_state() == states[step]
            assert whole_batches(resumed, 3) == expected[step + 1 : step + 4]


def test_processes_and_ranks_change_nothing(path) -> None:
    alone = whole_batches(ranks(path), 25)
    assert whole_batches(ranks(path, 2), 25) == whole_batches(ranks(path, num_proc=2), 25) == alone


def test_leaving_a_loop_early_goes_on_where_it_was(path) -> None:
    loader, expected = ranks(path)[0], whole_batches(ranks(path), 4)
    for _ in range(2):
        for number, _ in enumerate(loader):
            if number == 1:
                break
    assert whole_batches([loader], 1) == whole_batches(ranks(path), 5)[4:] != expected[:1]


def test_a_rest_that_gives_nothing_any_more_ends_its_pass(path, caplog) -> None:
    """Code that makes the rows may have changed since the position was saved."""
    place = {"consumed_train_samples": 20, "stream": {"epoch": 3, "row": 9, "features": 1}}
    loader, first = ranks(path)[0], {f"{path}:{number}" for number in range(1, 9)}
    loader.dataset.map(lambda row: row if row["prompt"] in {f"question {i}" for i in range(8)} else None)
    loader.load_state(place)
    assert list(loader) == [] and "is left after row 10 of pass 4" in caplog.text
    assert loader.get_state() == {"consumed_train_samples": 20, "stream": {"epoch": 4, "row": 0, "features": 0}}
    assert {f["row"] for batch in loader for f in batch} == first - {f"{path}:3"}
    nothing = ranks(path)[0]
    nothing.dataset.map(lambda row: None)
    nothing.load_state(place)
    assert list(nothing) == []
    for _ in range(2):
        with pytest.raises(DataError, match="no row can be trained on"):
            list(nothing)


def test_settings_are_checked(path) -> None:
    data = ranks(path)[0].dataset
    with pytest.raises(ConfigError, match="batch_size must be >= 1"):
        StreamLoader(data, batch_size=0)
    with pytest.raises(ValueError, match="dp_rank must be in"):
        StreamLoader(data, batch_size=1, dp_rank=1)
    with pytest.raises(ValueError, match="must be >= 0"):
        ranks(path)[0].resume_from_checkpoint(-1)
