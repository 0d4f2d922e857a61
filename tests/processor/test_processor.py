"""Micro-batches, padding, packing: cases S03 and S06."""

import random

import numpy as np
import pytest
import torch

from twinkle_research.data_format import IGNORE_INDEX as IGN
from twinkle_research.errors import ConfigError, DataError
from twinkle_research.processor import Batch, InputProcessor, pack


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
    assert batch.lengths == [4, 6]
    cut = collate([feature([7, 8, 9]), feature([1] * 6)])
    assert cut.attention_mask[0].tolist() == [1, 1, 1, 0, 0, 0] and cut.input_ids[0].tolist() == [7, 8, 9, 0, 0, 0]


def test_fields() -> None:
    batch = collate([feature([1, 2, 3], sample_index=4, row="a:1"), feature([5])])
    assert batch.input_ids.tolist() == [[1, 2, 3], [5, 0, 0]]
    assert batch.labels.tolist() == [[2, 3, IGN], [IGN, IGN, IGN]]
    assert batch.position_ids.tolist() == [[0, 1, 2], [0, 0, 0]]
    assert batch.sequence_ids.tolist() == [[0, 0, 0], [1, 1, 1]]
    assert batch.num_sequences == 2 and not batch.packed
    assert batch.sample_indices == [4, None] and batch.rows == ["a:1", None]
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
    assert batch.row_slice(1) == slice(2, 3)


@pytest.mark.parametrize("side", ["right", "left"])
def test_random_rows_come_back(side: str) -> None:
    rng = random.Random(0)
    features = []
    for i in range(20):
        ids = [rng.randrange(100) for _ in range(rng.randint(1, 12))]
        features.append(feature(ids, [i if rng.random() < 0.5 else IGN for _ in ids]))
    batch = collate(features, side)
    for i, f in enumerate(features):
        where = batch.row_slice(i)
        assert batch.input_ids[i, where].tolist() == f["input_ids"] and batch.labels[i, where].tolist() == f["labels"]
        assert int(batch.attention_mask[i].sum()) == len(f["input_ids"])
    assert int((batch.labels != IGN).sum()) == sum(label != IGN for f in features for label in f["labels"])


# --- loss inputs ----------------------------------------------------------------------------------------------------

TWO = [feature([1, 2, 3, 4], [IGN, 3, 4, IGN]), feature([5, 6, 7], [IGN, 7, IGN])]


def test_loss_inputs_in_all_forms_mean_the_same() -> None:
    expected = [[0.0, 0.5, -1.0, 0.0], [0.0, 2.0, 0.0, 0.0]]
    ragged = [[0.5, -1.0], [2.0]]
    full = [[9.0, 0.5, -1.0, 9.0], [9.0, 2.0, 9.0]]
    for values in (ragged, full, [np.array(v) for v in ragged], [torch.tensor(v) for v in full]):
        batch = collate(TWO, old_logps=values, ref_logps=values, advantages=values)
        for tensor in (batch.old_logprobs, batch.ref_logprobs, batch.advantages):
            assert tensor.tolist() == expected and tensor.dtype == torch.float32
    for values in ([3.0, -1.0], np.array([3.0, -1.0]), torch.tensor([3.0, -1.0])):
        assert collate(TWO, advantages=values).advantages.tolist() == [[0.0, 3.0, 3.0, 0.0], [0.0, -1.0, 0.0, 0.0]]


def test_bad_loss_inputs_are_named() -> None:
    with pytest.raises(ValueError, match=r"old_logps of r:1 has shape \(3,\); expected a scalar, 2 values .* or 4 values"):
        collate([{**TWO[0], "row": "r:1"}], old_logps=[[1.0, 2.0, 3.0]])
    with pytest.raises(ValueError, match="advantages has 1 entries for 2 rows"):
        collate(TWO, advantages=[1.0])
    with pytest.raises(TypeError, match="unknown loss input 'advantage': did you mean 'advantages'"):
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
    assert processor.split_indices([4, 4, 4, 4]) == [range(3), range(3, 4)]
    assert processor.split_indices([2, 6, 6, 2]) == [range(2), range(2, 4)]
    assert processor.split_indices([30, 1, 1]) == [range(1), range(1, 3)]
    rng = random.Random(1)
    for _ in range(200):
        lengths = [rng.randint(1, 15) for _ in range(rng.randint(0, 12))]
        parts = processor.split_indices(lengths)
        assert [i for part in parts for i in part] == list(range(len(lengths)))
        assert all(len(part) == 1 or len(part) * max(lengths[i] for i in part) <= 12 for part in parts)


def test_settings_are_checked() -> None:
    for options in ({"micro_batch_size": 0}, {"micro_batch_tokens": 0}, {"micro_batch_size": 1, "micro_batch_tokens": 1}):
        with pytest.raises(ConfigError, match="micro_batch"):
            InputProcessor(**options)
    with pytest.raises(ConfigError, match="did you mean 'right'"):
        InputProcessor(padding_side="rigth")


# --- packing --------------------------------------------------------------------------------------------------------


def test_s03_packed_documents_do_not_predict_each_other() -> None:
    packed = pack([feature([11, 12, 13]), feature([21, 22])])
    assert packed["input_ids"] == [11, 12, 13, 21, 22]
    assert packed["position_ids"] == [0, 1, 2, 0, 1]
    assert packed["labels"] == [12, 13, IGN, 22, IGN]
    batch = collate([packed, feature([1])])
    assert batch.packed and batch.num_sequences == 3
    assert batch.sequence_ids.tolist() == [[0, 0, 0, 1, 1], [2, 2, 2, 2, 2]]


def test_s03_packed_documents_do_not_see_each_other() -> None:
    """transformers keeps attention inside a document where positions restart and no mask is given."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    config = Qwen3Config(**sizes, num_attention_heads=2, num_key_value_heads=1, head_dim=8)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).eval()
    first, second = feature([11, 12, 13]), feature([21, 22])
    both = collate([pack([first, second])])
    with torch.no_grad():
        packed = model(input_ids=both.input_ids, position_ids=both.position_ids, use_cache=False).logits[0]
        alone = [model(input_ids=torch.tensor([f["input_ids"]])).logits[0] for f in (first, second)]
    torch.testing.assert_close(packed, torch.cat(alone), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("ids", "shown"), [([1.5, 2], "1.5"), ([True, 2], "True"), (["5", 2], "'5'"), ([None, 2], "None")])
def test_ids_that_are_no_whole_numbers_are_named(ids, shown):
    with pytest.raises(DataError, match=rf"rows.jsonl:3: input_ids\[0\] is {shown}, expected a whole number"):
        InputProcessor().collate([{"input_ids": ids, "labels": [-100, 2], "row": "rows.jsonl:3"}])
