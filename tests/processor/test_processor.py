"""Micro-batches, padding, packing: cases S03 and S06."""

import math
import random

import numpy as np
import pytest
import torch

from twinkle_research.data_format import IGNORE_INDEX as IGN
from twinkle_research.errors import ConfigError, DataError
from twinkle_research.processor import Batch, InputProcessor


def feature(ids: list[int], labels: list[int] | None = None, **extra: object) -> dict:
    labels = [*ids[1:], IGN] if labels is None else labels
    return {"input_ids": ids, "labels": labels, "length": len(ids), **extra}


def collate(features: list[dict], side: str = "right", **loss_inputs: object) -> Batch:
    return InputProcessor(side).collate(features, **loss_inputs)


def test_s06_padding_follows_lengths_not_ids() -> None:
    """The end token has the pad id: it stays trained, padding does not. A row without one gets none."""
    batch = collate([feature([4, 5, 6, 0], [5, 6, 0, IGN]), feature([1, 2, 3, 4, 5, 6])])
    assert batch.labels[0].tolist() == [5, 6, 0, IGN, IGN, IGN]
    assert batch.attention_mask[0].tolist() == [1, 1, 1, 1, 0, 0]
    assert [d.length for d in batch.documents] == [4, 6]
    cut = collate([feature([7, 8, 9]), feature([1] * 6)])
    assert cut.attention_mask[0].tolist() == [1, 1, 1, 0, 0, 0] and cut.input_ids[0].tolist() == [7, 8, 9, 0, 0, 0]


def test_fields() -> None:
    batch = collate([feature([1, 2, 3], sample_index=4, row="a:1"), feature([5])])
    assert batch.input_ids.tolist() == [[1, 2, 3], [5, 0, 0]]
    assert batch.labels.tolist() == [[2, 3, IGN], [IGN, IGN, IGN]]
    assert batch.position_ids.tolist() == [[0, 1, 2], [0, 0, 0]]
    assert batch.sequence_ids.tolist() == [[0, 0, 0], [1, 1, 1]]
    assert batch.num_sequences == 2 and not batch.packed
    assert [(d.row, d.where, d.sample_index, d.name) for d in batch.documents] == [
        (0, slice(0, 3), 4, "a:1"),
        (1, slice(0, 1), None, None),
    ]
    assert batch.advantages is batch.old_logprobs is batch.ref_logprobs is None
    tensors = [batch.input_ids, batch.labels, batch.attention_mask, batch.position_ids, batch.sequence_ids]
    assert {tensor.dtype for tensor in tensors} == {torch.int64}


def test_left_padding() -> None:
    batch = collate([feature([1, 2, 3]), feature([5])], side="left", advantages=[1.0, 2.0])
    assert batch.input_ids.tolist() == [[1, 2, 3], [0, 0, 5]]
    assert batch.attention_mask.tolist() == [[1, 1, 1], [0, 0, 1]]
    assert batch.position_ids.tolist() == [[0, 1, 2], [0, 0, 0]]
    assert batch.labels.tolist() == [[2, 3, IGN], [IGN, IGN, IGN]]
    assert batch.advantages.tolist() == [[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]
    assert batch.documents[1].where == slice(2, 3)


@pytest.mark.parametrize("side", ["right", "left"])
def test_random_rows_come_back(side: str) -> None:
    rng = random.Random(0)
    features = []
    for i in range(20):
        ids = [rng.randrange(100) for _ in range(rng.randint(1, 12))]
        features.append(feature(ids, [i if rng.random() < 0.5 else IGN for _ in ids]))
    batch = collate(features, side)
    for i, f in enumerate(features):
        where = batch.documents[i].where
        assert batch.input_ids[i, where].tolist() == f["input_ids"] and batch.labels[i, where].tolist() == f["labels"]
        assert int(batch.attention_mask[i].sum()) == len(f["input_ids"])
    assert int((batch.labels != IGN).sum()) == sum(label != IGN for f in features for label in f["labels"])


# --- loss inputs ----------------------------------------------------------------------------------------------------

TWO = [feature([1, 2, 3, 4], [IGN, 3, 4, IGN]), feature([5, 6, 7], [IGN, 7, IGN])]


def test_loss_inputs_in_all_forms_mean_the_same() -> None:
    expected = [[0.0, 0.5, -1.0, 0.0], [0.0, 2.0, 0.0, 0.0]]
    ragged = [[0.5, -1.0], [2.0]]
    full = [[9.0, 0.5, -1.0, math.nan], [-math.inf, 2.0, 9.0]]
    for values in (ragged, full, [np.array(v) for v in ragged], [torch.tensor(v) for v in full]):
        batch = collate(TWO, old_logps=values, ref_logps=values, advantages=values)
        for tensor in (batch.old_logprobs, batch.ref_logprobs, batch.advantages):
            assert tensor.tolist() == expected and tensor.dtype == torch.float32
    for values in ([3.0, -1.0], np.array([3.0, -1.0]), torch.tensor([3.0, -1.0])):
        assert collate(TWO, advantages=values).advantages.tolist() == [[0.0, 3.0, 3.0, 0.0], [0.0, -1.0, 0.0, 0.0]]


def test_bad_loss_inputs_are_named() -> None:
    with pytest.raises(DataError, match=r"old_logps of r:1 has shape \(3,\); expected a scalar, 2 values .* or 4 values"):
        collate([{**TWO[0], "row": "r:1"}], old_logps=[[1.0, 2.0, 3.0]])
    with pytest.raises(DataError, match="advantages has 1 entries for 2 rows"):
        collate(TWO, advantages=[1.0])
    with pytest.raises(ConfigError, match="unknown loss input 'advantage': did you mean 'advantages'"):
        collate(TWO, advantage=[1.0, 1.0])
    with pytest.raises(ValueError, match="at least one feature"):
        collate([])
    with pytest.raises(DataError, match="row 0: labels has 1 entries, input_ids 2"):
        collate([feature([1, 2], [3])])
    with pytest.raises(DataError, match="x:3: the row has no tokens"):
        collate([feature([], [], row="x:3")])


# --- micro-batches --------------------------------------------------------------------------------------------------


def test_split_by_rows() -> None:
    features = [feature([i]) for i in range(5)]
    assert [len(part) for part in InputProcessor(micro_batch_size=2).split(features)] == [2, 2, 1]
    assert [len(part) for part in InputProcessor().split(features)] == [1] * 5
    assert sum(InputProcessor(micro_batch_size=3).split(features), []) == features
    assert InputProcessor(micro_batch_size=3).split([]) == InputProcessor(micro_batch_tokens=3).split([]) == []


def test_split_by_tokens_counts_padding() -> None:
    processor = InputProcessor(micro_batch_tokens=12)
    assert processor.split_indices([4, 4, 4, 4]) == [[0, 1, 2], [3]]
    assert processor.split_indices([2, 6, 6, 2]) == [[1, 2], [0, 3]]  # the longest first
    assert processor.split_indices([30, 1, 1]) == [[0], [1, 2]]
    rng = random.Random(1)
    for _ in range(200):
        lengths = [rng.randint(1, 15) for _ in range(rng.randint(0, 12))]
        parts = processor.split_indices(lengths)
        assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
        assert all(len(part) == 1 or len(part) * max(lengths[i] for i in part) <= 12 for part in parts)


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_pairs_stay_together_and_in_order(packing: bool) -> None:
    """A budget holds both rows of a pair; the rows of a padded micro-batch are as long as its longest."""
    assert InputProcessor(micro_batch_size=2).split_indices([1, 2, 3, 4, 5, 6], together=2) == [[0, 1, 2, 3], [4, 5]]
    assert InputProcessor().split_indices([1, 2, 3, 4], together=2) == [[0, 1], [2, 3]]
    processor = InputProcessor(micro_batch_tokens=24, packing=packing)
    # Packed, pairs take 14, 10 and 10 of the 24; padded, their longest rows have 9, 6 and 5 tokens, each twice.
    expected = [[0, 1, 2, 3], [4, 5]] if packing else [[0, 1], [4, 5, 2, 3]]
    assert processor.split_indices([5, 9, 5, 5, 6, 4], together=2) == expected
    rng = random.Random(1)
    for _ in range(200):
        lengths = [rng.randint(1, 15) for _ in range(2 * rng.randint(0, 7))]
        parts = processor.split_indices(lengths, together=2)
        assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
        for part in parts:
            assert all(b == a + 1 and a % 2 == 0 for a, b in zip(part[::2], part[1::2], strict=True))
            size = sum(lengths[i] for i in part) if packing else len(part) * max(lengths[i] for i in part)
            assert len(part) == 2 or size <= 24


def test_settings_are_checked() -> None:
    for options in ({"micro_batch_size": 0}, {"micro_batch_tokens": 0}, {"micro_batch_size": 1, "micro_batch_tokens": 1}):
        with pytest.raises(ConfigError, match="micro_batch"):
            InputProcessor(**options)
    with pytest.raises(ConfigError, match="did you mean 'right'"):
        InputProcessor(padding_side="rigth")


# --- packing --------------------------------------------------------------------------------------------------------


def test_s03_packed_documents_do_not_predict_each_other() -> None:
    batch = InputProcessor(packing=True).collate(
        [feature([11, 12, 13], sample_index=3), feature([21, 22], row="b:2")], advantages=[2.0, [5.0]]
    )
    assert batch.input_ids.tolist() == [[11, 12, 13, 21, 22]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1]]
    assert batch.labels.tolist() == [[12, 13, IGN, 22, IGN]]
    assert batch.attention_mask.tolist() == [[1] * 5] and batch.sequence_ids.tolist() == [[0, 0, 0, 1, 1]]
    assert batch.advantages.tolist() == [[2.0, 2.0, 0.0, 5.0, 0.0]]
    assert batch.packed and batch.num_sequences == 2
    assert [(d.row, d.where, d.sample_index, d.name) for d in batch.documents] == [
        (0, slice(0, 3), 3, None),
        (0, slice(3, 5), None, "b:2"),
    ]
    assert batch.document_at(0, 3) is batch.documents[1]


def test_features_that_are_packed_already() -> None:
    """A feature whose positions restart holds several sequences, padded or packed with others."""
    two = feature([11, 12, 13, 21, 22], [12, 13, IGN, 22, IGN], position_ids=[0, 1, 2, 0, 1])
    padded = collate([two, feature([1])])
    assert padded.packed and padded.num_sequences == 3
    assert padded.sequence_ids.tolist() == [[0, 0, 0, 1, 1], [2, 2, 2, 2, 2]]
    packed = InputProcessor(packing=True).collate([feature([1]), two])
    assert packed.sequence_ids.tolist() == [[0, 1, 1, 1, 2, 2]] and len(packed.documents) == 2


def test_positions_that_would_join_two_documents_are_refused() -> None:
    later = feature([4, 5], position_ids=[3, 4], row="b:2")
    with pytest.raises(DataError, match=r"b:2: position_ids begins with 3, .* begin with 0"):
        InputProcessor(packing=True).collate([feature([1, 2, 3]), later])
    assert collate([feature([1, 2, 3]), later]).position_ids.tolist() == [[0, 1, 2], [3, 4, 0]]


def test_packed_rows_are_full() -> None:
    processor = InputProcessor(micro_batch_tokens=10, packing=True)
    assert processor.split_indices([3, 7, 5, 4, 12, 1]) == [[4], [1, 0], [2, 3, 5]]
    rng = random.Random(2)
    for _ in range(200):
        lengths = [rng.randint(1, 12) for _ in range(rng.randint(0, 30))]
        parts = processor.split_indices(lengths)
        assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
        assert all(len(part) == 1 or sum(lengths[i] for i in part) <= 10 for part in parts)
        half = [sum(lengths[i] for i in part) <= 5 for part in parts]
        assert sum(half) <= 1  # two such rows would fit into one
    with pytest.raises(ConfigError, match="packing needs micro_batch_tokens"):
        InputProcessor(micro_batch_size=2, packing=True)


@pytest.mark.parametrize(("ids", "shown"), [([1.5, 2], "1.5"), ([True, 2], "True"), (["5", 2], "'5'"), ([None, 2], "None")])
def test_ids_that_are_no_whole_numbers_are_named(ids, shown):
    with pytest.raises(DataError, match=rf"rows.jsonl:3: input_ids\[0\] is {shown}, expected a whole number"):
        InputProcessor().collate([{"input_ids": ids, "labels": [-100, 2], "row": "rows.jsonl:3"}])


def test_the_distribution_that_rows_were_drawn_from() -> None:
    """Temperatures spread over rows; kept sets as pairs of flat place and token, in ascending places, padded and packed."""
    rows = [
        feature([1, 2, 3], [IGN, 3, 4], temperature=0.5, kept_ids=[[3, 7], [4]]),
        feature([5, 6], [6, IGN]),
        feature([8, 9, 9, 9], [IGN, 9, 9, IGN], temperature=2.0, kept_ids=[[9], [1, 9]]),
    ]
    padded = collate(rows)
    assert padded.temperature.tolist() == [[0.5, 0.5, 0.5, 1.0], [1.0] * 4, [2.0] * 4]
    assert [t.tolist() for t in padded.kept] == [[1, 1, 2, 9, 10, 10], [3, 7, 4, 9, 1, 9]]
    left = collate(rows, "left")
    assert [t.tolist() for t in left.kept] == [[2, 2, 3, 9, 10, 10], [3, 7, 4, 9, 1, 9]]
    packed = InputProcessor(micro_batch_tokens=99, packing=True).collate(rows)
    assert packed.temperature.tolist() == [[0.5] * 3 + [1.0] * 2 + [2.0] * 4]
    assert [t.tolist() for t in packed.kept] == [[1, 1, 2, 6, 7, 7], [3, 7, 4, 9, 1, 9]]
    plain = collate([feature([1, 2])])
    assert plain.temperature is None and plain.kept is None
    (nothing,) = {len(part) for part in collate([feature([1, 2], [IGN, IGN], kept_ids=[])]).kept}
    assert nothing == 0


@pytest.mark.parametrize(
    "row, message",
    [
        (feature([1, 2], [2, IGN], kept_ids=[[3]], row="a:1"), r"a:1: label 2 is not in its own kept set \(kept_ids\[0\]\)"),
        (feature([1, 2], [2, IGN], kept_ids=[], row="a:1"), "a:1: kept_ids has 0 sets for 1 trained positions"),
        (feature([1, 2], temperature=0.0), "row 0: temperature must be > 0, got 0.0"),
    ],
)
def test_a_row_that_cannot_have_been_drawn_so(row: dict, message: str) -> None:
    with pytest.raises(DataError, match=message):
        collate([row])
