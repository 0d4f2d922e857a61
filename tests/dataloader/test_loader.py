"""DataLoader: case S23 (position, order and world size), and what iteration promises."""

import pytest

from twinkle_research.dataloader import DataLoader
from twinkle_research.dataset.order import keyed_permutation
from twinkle_research.errors import ConfigError, DataError


def rows(count: int) -> list[dict]:
    return [{"input_ids": [i]} for i in range(count)]


def numbers(batch: list[dict]) -> list[int]:
    return [feature["input_ids"][0] for feature in batch]


def ranks(size: int, count: int, **options: object) -> list[DataLoader]:
    return [DataLoader(rows(count), dp_rank=r, dp_size=size, **options) for r in range(size)]


def global_batches(loaders: list[DataLoader]) -> list[list[int]]:
    """The rest of the epoch, put together again from the shares of all ranks by sample_index."""
    batches = []
    for parts in zip(*loaders, strict=True):
        whole = sorted((f["sample_index"], f["input_ids"][0]) for part in parts for f in part)
        assert [j for j, _ in whole] == list(range(len(whole)))
        for rank, part in enumerate(parts):
            assert all(f["sample_index"] % len(loaders) == rank for f in part)
        batches.append([number for _, number in whole])
    assert len({loader.consumed_train_samples for loader in loaders}) == 1
    return batches


@pytest.mark.parametrize("workers", [0, 2])
def test_s23_resume_on_other_numbers_of_ranks(workers: int) -> None:
    def stop_after(loaders: list[DataLoader], updates: int) -> tuple[list[int], int]:
        seen = []
        for parts in zip(*loaders, strict=True):
            seen += sorted(n for part in parts for n in numbers(part))
            updates -= 1
            if updates == 0:
                break
        return seen, loaders[0].get_state()["consumed_train_samples"]

    options = {"batch_size": 4, "num_workers": workers}
    seen, state = stop_after(ranks(2, 24, **options), 3)
    assert state == 12
    for first, second in ((1, 4), (4, 1), (2, 3)):
        everything, position = list(seen), state
        loaders = ranks(first, 24, **options)
        for loader in loaders:
            loader.resume_from_checkpoint(position)
        part, position = stop_after(loaders, 1)
        assert part == [12, 13, 14, 15] and position == 16
        loaders = ranks(second, 24, **options)
        for loader in loaders:
            loader.resume_from_checkpoint(position)
        rest = [n for batch in global_batches(loaders) for n in batch]
        assert everything + part + rest == list(range(24))


@pytest.mark.parametrize("drop_last", [True, False])
def test_s23_every_rank_gives_as_many_batches(drop_last: bool) -> None:
    """10 rows, 3 ranks with 2 rows each: one full batch, and one of four rows unless it is dropped."""
    loaders = ranks(3, 10, batch_size=6, drop_last=drop_last)
    sizes = [[len(batch) for batch in loader] for loader in loaders]
    assert sizes == ([[2], [2], [2]] if drop_last else [[2, 2], [2, 1], [2, 1]])
    assert [loader.consumed_train_samples for loader in loaders] == [6 if drop_last else 10] * 3
    assert {len(loader) for loader in loaders} == {1 if drop_last else 2}


def test_a_rank_may_get_no_rows() -> None:
    loaders = ranks(4, 5, batch_size=4)
    assert [numbers(list(loader)[-1]) for loader in loaders] == [[4], [], [], []]


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("workers", [0, 2])
def test_s23_shuffled_epochs_resume_anywhere(workers: int, drop_last: bool) -> None:
    options = {"batch_size": 4, "shuffle": True, "seed": 3, "drop_last": drop_last, "num_workers": workers}

    def fresh() -> DataLoader:
        return DataLoader(rows(10), **options)

    loader = fresh()
    epochs, states = [], []
    for epoch in range(3):
        assert loader.epoch == epoch
        batches = []
        for batch in loader:
            batches.append(numbers(batch))
            states.append(loader.get_state()["consumed_train_samples"])
        epochs.append(batches)
    flat = [batch for batches in epochs for batch in batches]
    assert all(len(batches) == len(loader) == (2 if drop_last else 3) for batches in epochs)
    assert all(len(set(sum(batches, []))) == (8 if drop_last else 10) for batches in epochs)
    assert len({str(batches) for batches in epochs}) == 3  # each epoch has its own order
    for step, state in enumerate(states):
        resumed = fresh()
        resumed.resume_from_checkpoint(state)
        rest = []
        while len(rest) < len(flat) - step - 1:
            rest += [numbers(batch) for batch in resumed]
        assert rest == flat[step + 1 :]


def test_order_depends_on_seed_and_epoch_only() -> None:
    def order(**options: object) -> list[int]:
        return [n for batch in global_batches(ranks(options.pop("size", 1), 50, shuffle=True, **options)) for n in batch]

    reference = order(batch_size=8, seed=1)
    assert sorted(reference) == list(range(50)) != reference
    assert order(batch_size=5, seed=1) == order(batch_size=8, seed=1, size=3) == reference
    assert order(batch_size=8, seed=1, num_workers=3) == reference
    assert order(batch_size=8, seed=2) != reference
    assert keyed_permutation(8, 0, "data_order", 0).tolist() == [0, 3, 7, 2, 6, 1, 5, 4]  # for ever


def test_leaving_a_loop_early_goes_on_where_it_was() -> None:
    loader = DataLoader(rows(6), batch_size=2)
    for batch in loader:
        assert numbers(batch) == [0, 1]
        break
    assert [numbers(batch) for batch in loader] == [[2, 3], [4, 5]]
    assert loader.epoch == 1
    assert [numbers(batch) for batch in loader] == [[0, 1], [2, 3], [4, 5]]


def test_workers_give_out_nothing_early() -> None:
    loader = DataLoader(rows(20), batch_size=2, num_workers=2)
    for step, _ in enumerate(loader, start=1):
        assert loader.consumed_train_samples == 2 * step


def test_errors_of_a_data_set_arrive_with_and_without_workers() -> None:
    class Broken:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> dict:
            raise RuntimeError(f"cannot read row {index}")

    for workers in (0, 2):
        with pytest.raises(RuntimeError, match="cannot read row 0"):
            next(iter(DataLoader(Broken(), batch_size=2, num_workers=workers)))


def test_rows_of_the_data_set_are_left_alone() -> None:
    data = rows(2)
    list(DataLoader(data, batch_size=2))
    assert data == rows(2)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"batch_size": 0}, ConfigError),
        ({"batch_size": 2, "num_workers": -1}, ConfigError),
        ({"batch_size": 2, "dp_rank": 2, "dp_size": 2}, ValueError),
        ({"batch_size": 20, "drop_last": True}, DataError),
    ],
)
def test_settings_are_checked(options: dict, error: type) -> None:
    with pytest.raises(error):
        DataLoader(rows(10), **options)


def test_empty_data_and_bad_positions() -> None:
    with pytest.raises(DataError, match="no batch of 2 rows in 0 rows"):
        DataLoader([], batch_size=2)
    with pytest.raises(ValueError, match="must be >= 0"):
        DataLoader(rows(2), batch_size=2).skip_consumed_samples(-1)
