"""Mixtures: shares, order, passes, epochs."""

import itertools
import json
import random
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from chat_styles import make_tokenizer

from twinkle_research.dataloader import DataLoader
from twinkle_research.dataset import Dataset, DatasetMeta, MixedDataset, build_datasets
from twinkle_research.dataset.config import MixDataConfig, MixSource, MixStop, TrainOn
from twinkle_research.dataset.interleave import interleaving, whole_parts
from twinkle_research.errors import ConfigError, DataError
from twinkle_research.template import Template, build_template


def rows(name: str, count: int) -> list[dict]:
    return [{"prompt": f"{name} {i}", "completion": "yes " * (1 + i % 3)} for i in range(count)]


def encoded(name: str, count: int) -> Dataset:
    return Dataset(DatasetMeta(name, data=rows(name, count))).set_template(Template(tokenizer=make_tokenizer("chatml"))).encode()


def names(features: list[dict]) -> list[str]:
    """ "a[3]" for each."""
    return [feature["row"] for feature in features]


# --- turns ----------------------------------------------------------------------------------------------------------


def test_golden_order_of_turns() -> None:
    """7 : 3. The first turn is the heavier source's; after that a source comes when it is nearest to being a row short."""
    assert interleaving([0.7, 0.3], [700, 300])[:20].tolist() == [0, 1, 0, 0, 0, 1, 0, 0, 1, 0] * 2
    assert interleaving([1, 1, 1], [2, 2, 2]).tolist() == [0, 1, 2, 0, 1, 2]
    assert interleaving([5, 5], [2, 9]).tolist() == [0, 1, 0, 1]
    assert interleaving([5, 5], [2, 9], "all_exhausted").tolist() == [0, 1] * 9
    assert interleaving([3], [4]).tolist() == [0, 0, 0, 0]


def test_shares_are_within_one_row_in_each_prefix() -> None:
    """Tijdeman's bound, 1 - 1 / (2k - 2), in exact arithmetic."""
    draw = random.Random(3)
    for _ in range(60):
        k = draw.randint(2, 6)
        weights = [draw.choice([draw.randint(1, 30), round(draw.uniform(0.01, 2), 2)]) for _ in range(k)]
        sizes = [draw.randint(1, 200) for _ in range(k)]
        shares = [Fraction(str(w)) / sum(Fraction(str(v)) for v in weights) for w in weights]
        for stop in ("first_exhausted", "all_exhausted"):
            turns = interleaving(weights, sizes, stop)[:3000]
            counts = [0] * k
            for n, turn in enumerate(turns, start=1):
                counts[turn] += 1
                worst = max(abs(count - n * share) for count, share in zip(counts, shares, strict=True))
                assert worst <= 1 - Fraction(1, 2 * k - 2)


def test_where_an_epoch_ends() -> None:
    draw = random.Random(4)
    for _ in range(40):
        k = draw.randint(2, 4)
        weights, sizes = [draw.randint(1, 9) for _ in range(k)], [draw.randint(1, 60) for _ in range(k)]
        endless = np.resize(interleaving(weights, [w * 1000 for w in weights])[: sum(weights)], 60 * sum(weights) + 1)
        first, last = (interleaving(weights, sizes, stop) for stop in ("first_exhausted", "all_exhausted"))
        for turns in (first, last):
            assert (turns == endless[: len(turns)]).all()
        taken = np.bincount(first, minlength=k)
        following = endless[len(first)]
        assert (taken <= sizes).all() and taken[following] == sizes[following]  # one more would be one too many
        assert (np.bincount(last, minlength=k) >= sizes).all()
        assert (np.bincount(last[:-1], minlength=k) < sizes).any()  # one less would be one too few


def test_weights_in_whole_numbers() -> None:
    assert whole_parts([0.7, 0.3]) == [7, 3] and whole_parts([0.1, 0.2, 0.30000000000000004])[:2] != [1, 2]
    assert whole_parts([2, 4]) == [1, 2] and whole_parts([1e-3, 1]) == [1, 1000]
    for wrong in (0, -1, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match="a weight must be > 0"):
            whole_parts([1, wrong])
    with pytest.raises(DataError, match="would have about .* rows"):
        interleaving([1e-9, 1], [10, 10], "all_exhausted")
    with pytest.raises(ConfigError, match="stop='first'"):
        interleaving([1, 1], [1, 1], "first")
    with pytest.raises(ConfigError, match="one weight for each of its 2 sources, got 3"):
        interleaving([1, 1, 1], [1, 1])


# --- rows -----------------------------------------------------------------------------------------------------------


def test_rows_of_a_mixture() -> None:
    mixed = MixedDataset([encoded("a", 7), encoded("b", 20)], [0.7, 0.3])
    assert len(mixed) == 27 and mixed.rows_per_epoch == 10 and mixed.rows_of_sources == [7, 3]
    assert names([mixed[i] for i in mixed.epoch_order(0, False, 0)]) == [
        "a[0]", "b[0]", "a[1]", "a[2]", "a[3]", "b[1]", "a[4]", "a[5]", "b[2]", "a[6]",
    ]  # fmt: skip
    # The next epoch takes the rows of b that have not been yet.
    assert names([mixed[i] for i in mixed.epoch_order(1, False, 0)])[1::4] == ["b[3]", "b[4]", "a[6]"]
    numbers = mixed.epoch_order(3, True, 8)
    assert mixed.lengths(numbers).tolist() == [mixed[i]["length"] for i in numbers]
    assert mixed[-1] == mixed[26] and mixed[26]["row"] == "b[19]"
    with pytest.raises(IndexError):
        mixed[27]


def test_no_row_comes_again_before_all_have_come() -> None:
    """Also across epochs, whose ends fall anywhere in the passes over a source; each pass has an order of its own."""
    sizes = [5, 11, 3]
    mixed = MixedDataset([encoded(name, size) for name, size in zip("abc", sizes, strict=True)], [1, 1, 2], "all_exhausted")
    drawn: dict[str, list[str]] = {"a": [], "b": [], "c": []}
    for epoch in range(6):
        order = mixed.epoch_order(epoch, True, 9)
        assert len(order) == mixed.rows_per_epoch and order.tolist() == mixed.epoch_order(epoch, True, 9).tolist()
        for name in names([mixed[i] for i in order]):
            drawn[name[0]].append(name)
    for size, found in zip(sizes, drawn.values(), strict=True):
        passes = [found[i : i + size] for i in range(0, len(found) - size + 1, size)]
        assert len(passes) >= 6 and all(len(set(part)) == size for part in passes)
        assert len(set(map(tuple, passes))) > 3
    assert mixed.epoch_order(0, True, 9).tolist() != mixed.epoch_order(0, True, 10).tolist()


@pytest.mark.parametrize("stop", ["first_exhausted", "all_exhausted"])
def test_a_mixture_resumes_at_every_position(stop: str) -> None:
    def loader() -> DataLoader:
        mixed = MixedDataset([encoded("a", 6), encoded("b", 9)], [0.6, 0.4], stop)
        return DataLoader(mixed, batch_size=4, shuffle=True, seed=2)

    whole = loader()
    batches, states = [], []
    for _ in range(3):
        for batch in whole:
            batches.append(names(batch))
            states.append(whole.get_state())
    assert len(batches) == 3 * len(whole)
    for step, state in enumerate(states):
        resumed = loader()
        resumed.load_state(state)
        rest = list(itertools.chain.from_iterable([names(batch) for batch in resumed] for _ in range(3)))
        assert rest[: len(batches) - step - 1] == batches[step + 1 :]


def test_fingerprint_of_a_mixture() -> None:
    a, b = encoded("a", 4), encoded("b", 5)
    made = [
        MixedDataset([a, b]), MixedDataset([b, a]), MixedDataset([a, b], [2, 1]), MixedDataset([a, b], stop="all_exhausted"),
        MixedDataset([a, encoded("b", 6)]),
    ]  # fmt: skip
    assert len({mixed.fingerprint for mixed in made}) == len(made)
    assert made[0].fingerprint == MixedDataset([encoded("a", 4), encoded("b", 5)], [1.0, 1.0]).fingerprint


def test_mistakes() -> None:
    with pytest.raises(ConfigError, match="one weight a data set, got 1 for 2"):
        MixedDataset([encoded("a", 2), encoded("b", 2)], [1])
    with pytest.raises(ConfigError, match="encode must come before mixing"):
        MixedDataset([Dataset(DatasetMeta(data=rows("a", 2)))])


# --- sources that are added to a data set ---------------------------------------------------------------------------


def test_added_sources() -> None:
    first, second = DatasetMeta("a", data=rows("a", 4)), DatasetMeta("b", data=rows("b", 2))

    def joined(*args: object, **options: object) -> list[str]:
        data = Dataset(first).add_dataset(second)
        data.map(lambda row: {**row, "prompt": row["prompt"].upper()}, dataset_meta=second)
        data.filter(lambda row: row["prompt"] != "B 0", dataset_meta=second).mix_dataset(*args, **options)
        assert data.encoded is False and len(data) == len(data.origins)
        return [f"{origin} {row['prompt']}" for origin, row in zip(data.origins, data, strict=True)]

    a = [f"a[{i}] a {i}" for i in range(4)]
    assert joined(False) == [*a, "b[1] B 1"]
    assert joined() == [a[0], "b[1] B 1", a[1]]
    assert joined(stop="all_exhausted") == [a[0], "b[1] B 1", a[1], "b[1] B 1", a[2], "b[1] B 1", a[3]]
    assert joined(True, [4, 1]) == [a[0], a[1], "b[1] B 1", a[2], a[3]]
    with pytest.raises(ConfigError, match="mix_dataset must come before encode"):
        Dataset(first).add_dataset(second).set_template(Template(tokenizer=make_tokenizer("chatml"))).encode()


# --- from the config ------------------------------------------------------------------------------------------------


def build(tmp_path: Path, *sources: dict, seed: int = 0, **options: object) -> tuple[MixedDataset, MixedDataset | None]:
    for name, count in (("a", 30), ("b", 12)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(name, count)))
    made = [MixSource(path=str(tmp_path / f"{s.pop('name')}.jsonl"), **s) for s in map(dict, sources)]
    config = MixDataConfig(name="mix", sources=made, cache_dir=str(tmp_path / "kept"), **options)
    return build_datasets(config, build_template(config, tokenizer=make_tokenizer("chatml")), seed)


def test_mixture_from_config(tmp_path, caplog) -> None:
    caplog.set_level("INFO")
    mixed, held_out = build(tmp_path, {"name": "a", "weight": 0.7}, {"name": "b", "weight": 0.3})
    assert held_out is None and mixed.rows_of_sources == [29, 12]
    assert (
        f"data.sources[0] ({tmp_path}/a.jsonl): 30 rows, {mixed.datasets[0].tokens} tokens; an epoch takes 29 rows of it, 70.73 %"
        in caplog.text
    )
    assert f"data.sources[1] ({tmp_path}/b.jsonl): 12 rows" in caplog.text
    longer, _ = build(tmp_path, {"name": "a", "weight": 0.7}, {"name": "b", "weight": 0.3}, stop=MixStop.all_exhausted)
    assert longer.rows_of_sources == [30, 13]


def test_held_out_rows_of_a_mixture(tmp_path) -> None:
    """By the weights, and none of them is trained on."""
    mixed, held_out = build(tmp_path, {"name": "a", "weight": 3}, {"name": "b"}, eval_rows=8)
    assert len(held_out) == 8 and len(mixed) == 34
    held, left = names(list(held_out)), names(list(mixed))
    assert sum("a.jsonl" in name for name in held) == 6 and not set(held) & set(left)
    again = build(tmp_path, {"name": "a", "weight": 3}, {"name": "b"}, eval_rows=8)[1]
    other = build(tmp_path, {"name": "a", "weight": 3}, {"name": "b"}, eval_rows=8, seed=1)[1]
    assert names(list(again)) == held != names(list(other))
    with pytest.raises(DataError, match=r"data.eval_rows=13: cannot hold out 13 of 12 rows of .*b.jsonl"):
        build(tmp_path, {"name": "a"}, {"name": "b"}, eval_rows=26)


def test_settings_of_one_source(tmp_path) -> None:
    own = {"default_system": "Be brief.", "train_on": TrainOn.all, "limit": 5, "processor": "SelfCognitionProcessor"}
    mixed, _ = build(tmp_path, {"name": "a", **own}, {"name": "b"}, default_system="Be kind.")
    decoded = {name: mixed.datasets[0].template.decode(mixed[i]["input_ids"]) for name, i in (("a", 0), ("b", 5))}
    assert "Be brief." in decoded["a"] and "Be kind." in decoded["b"] and len(mixed.datasets[0]) == 5
    assert mixed[0]["labels"][:3].count(-100) == 0 and mixed[5]["labels"][:3] == [-100] * 3
    with pytest.raises(ConfigError, match=r"give one of data.sources\[1\].path and data.sources\[1\].dataset_id"):
        build(tmp_path, {"name": "a"}, {"name": "b", "dataset_id": "x"})
    with pytest.raises(ConfigError, match=r"data.sources\[1\].processor='Slf'"):
        build(tmp_path, {"name": "a"}, {"name": "b", "processor": "Slf"})
    with pytest.raises(ConfigError, match="data=mix needs data.sources"):
        build(tmp_path)
