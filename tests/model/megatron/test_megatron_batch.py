"""A batch becomes documents without padding, and each token goes to one of the processes that share them."""

import random

import pytest
import torch

from twinkle_research.model.megatron.batch import LocalBatch, local_parts
from twinkle_research.processor.base import InputProcessor

LAYOUTS = [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (3, 2), (4, 8)]  # context, multiple
PROCESSORS = [InputProcessor("right"), InputProcessor("left"), InputProcessor(packing=True, micro_batch_tokens=500)]


def features(seed):
    """Some hold several sequences, some train nothing."""
    rng = random.Random(seed)
    found = []
    for i in range(rng.randint(1, 6)):
        sequences = [rng.randint(1, 9) for _ in range(rng.randint(1, 3))]
        ids = [rng.randrange(1, 1000) for _ in range(sum(sequences))]
        labels = [*ids[1:], 1]
        kept = [rng.random() < 0.5 and i != 1 for _ in labels]
        labels = [label if keep else -100 for label, keep in zip(labels, kept, strict=True)]
        positions = [position for length in sequences for position in range(length)]
        found.append({"input_ids": ids, "labels": labels, "position_ids": positions, "sample_index": 10 + i})
    return found


def lengths_of(batch):
    return [p for f in batch for p in torch.tensor([*f["position_ids"], 0]).eq(0).nonzero().squeeze(-1).diff().tolist()]


def parts(batch, context, multiple):
    options = {"vocabulary": 1000, "device": torch.device("cpu"), "dtype": torch.float32}
    return [
        LocalBatch.of(batch, 3, range(len(batch.documents)), **options, **local_parts(batch, rank, context, multiple))
        for rank in range(context)
    ]


@pytest.mark.parametrize("processor", PROCESSORS, ids=["right", "left", "packed"])
@pytest.mark.parametrize(("context", "multiple"), LAYOUTS)
@pytest.mark.parametrize("seed", range(5))
def test_every_token_is_in_one_place(seed, context, multiple, processor):
    rows = features(seed)
    batch = processor.collate(rows)
    ids = torch.tensor([token for row in rows for token in row["input_ids"]])
    labels = torch.tensor([label for row in rows for label in row["labels"]])
    each = 2 * context if context > 1 else 1
    local = parts(batch, context, multiple)

    places = torch.cat([part.where_T[part.where_T >= 0] for part in local])
    assert torch.equal(places.sort().values, torch.arange(len(ids)))
    trained = torch.cat([part.places_n for part in local]).sort().values
    assert torch.equal(trained, (batch.labels.view(-1) != -100).nonzero().squeeze(-1))
    for part in local:
        real = part.where_T >= 0
        assert torch.equal(part.ids_T[real], ids[part.where_T[real]])
        assert not part.ids_T[~real].any()
        assert torch.equal(batch.labels.view(-1)[part.places_n], labels[part.where_T[part.rows_n]])
        assert torch.equal(part.places_n.sort().values, part.places_n)
        assert len(part.ids_T) == sum(part.lengths) // context and len(part.ids_T) % multiple == 0
        expected = [-(-length // each) * each for length in lengths_of(rows)]
        assert list(part.lengths[: len(expected)]) == expected and len(part.lengths) <= len(expected) + 1


def test_positions_of_two_processes():
    """The first and the last quarter of each document, and the two between."""
    batch = InputProcessor().collate([{"input_ids": list(range(1, 9))}])
    first, second = parts(batch, 2, 1)
    assert first.ids_T.tolist() == [1, 2, 7, 8] and second.ids_T.tolist() == [3, 4, 5, 6]
    batch = InputProcessor().collate([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5, 6, 7, 8]}])
    first, second = parts(batch, 2, 1)
    assert first.lengths == (4, 8)
    assert first.ids_T.tolist() == [1, 0, 4, 5, 0, 0] and second.ids_T.tolist() == [2, 3, 6, 7, 8, 0]


@pytest.mark.parametrize("context", [1, 2])
def test_what_layers_are_told(context):
    rows = features(2)
    for part in parts(InputProcessor("left").collate(rows), context, 4):
        ids, params = part.inputs_on(torch.device("cpu"))
        ends = [0]
        for length in part.lengths:
            ends.append(ends[-1] + length)
        assert ids.shape == (1, len(part.ids_T)) and params.qkv_format == "thd"
        for name in ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"):
            assert getattr(params, name).tolist() == ends and getattr(params, name).dtype == torch.int32
        assert params.max_seqlen_q == params.max_seqlen_kv == max(part.lengths)
        assert params.tokens.documents == tuple((row["sample_index"], len(row["input_ids"])) for row in rows)
        assert params.tokens.step == 3 and params.tokens.where is not None


def test_filled_up():
    """To one length, where stages do not tell each other theirs."""
    for part in parts(InputProcessor().collate([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5, 6, 7, 8]}]), 2, 2):
        before = part.ids_T.tolist()
        part.fill_up(24)
        assert part.lengths == (4, 8, 12) and len(part.ids_T) == len(part.where_T) == 12
        assert part.ids_T.tolist() == [*before, *[0] * 6] and (part.where_T[6:] == -1).all()
