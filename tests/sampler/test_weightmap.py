"""Where tensors lie in an engine, found by loading numbers; checksums of both sides. With loaders of our own."""

import pytest
import torch

from twinkle_research.errors import UserError
from twinkle_research.sampler.weightmap import WeightMap, checksum, tagged

SHAPES = {"q": (4, 6), "k": (2, 6), "v": (2, 6), "o": (6, 4), "embed": (5, 6), "norm": (7,), "q.bias": (4,), "k.bias": (2,)}
CPU = torch.device("cpu")


def targets(dtype=torch.float32):
    """One rank's engine: q, k and v under each other, the embedding padded to 8 rows."""
    shapes = {"qkv": (8, 6), "o": (6, 4), "embed": (8, 6), "norm": (7,), "qkv.bias": (6,)}
    return {name: torch.zeros(shape, dtype=dtype) for name, shape in shapes.items()}


def load(into, weights):
    places = {"q": ("qkv", 0), "k": ("qkv", 4), "v": ("qkv", 6), "q.bias": ("qkv.bias", 0), "k.bias": ("qkv.bias", 4)}
    for name, tensor in weights:
        target, start = places.get(name, (name, 0))
        into[target][start : start + len(tensor)].copy_(tensor)


def mapped(into, load=load):
    load(into, tagged(SHAPES, CPU))
    found = WeightMap(SHAPES, into, complete=True)
    found.set_counts([found.counts])
    return found


def drawn(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def sums(found, weights):
    return {name: found.checksum(name, tensor) for name, tensor in weights.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_weights_have_equal_checksums(dtype):
    into = targets(dtype)
    found = mapped(into)
    for seed in range(3):
        weights = drawn(seed)
        load(into, weights.items())
        assert found.differing(sums(found, weights), [found.read(into)]) == []
        assert found.differing(sums(found, drawn(seed + 1)), [found.read(into)]) == list(SHAPES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_bit_of_any_tensor_is_found(dtype):
    into = targets(dtype)
    found = mapped(into)
    weights = drawn()
    for name, tensor in weights.items():
        load(into, weights.items())
        changed = tensor.clone()
        bits = changed.to(dtype)
        bits.view({2: torch.int16, 4: torch.int32}[dtype.itemsize]).flatten()[-1] ^= 1
        load(into, [(name, bits)])
        assert found.differing(sums(found, weights), [found.read(into)]) == [name]


def test_exchanged_tensors_are_found():
    into = targets()
    found, weights = mapped(into), drawn()
    load(into, ({**weights, "k": weights["v"], "v": weights["k"]}).items())
    assert found.differing(sums(found, weights), [found.read(into)]) == ["k", "v"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_over_ranks(dtype):
    """Rows of q, columns of o and rows of the embedding are cut in two; k, v and the rest are in both."""
    ranks = [
        {
            name: torch.zeros(shape, dtype=dtype)
            for name, shape in {"q": (2, 6), "kv": (4, 6), "o": (6, 2), "embed": (3, 6), "norm": (7,), "bias": (4,)}.items()
        }
        for _ in range(2)
    ]

    def spread(weights):
        for name, tensor in weights:
            for i, rank in enumerate(ranks):
                if name == "q":
                    rank["q"].copy_(tensor[2 * i : 2 * i + 2])
                elif name in "kv":
                    rank["kv"][2 * "kv".index(name) :][:2].copy_(tensor)
                elif name == "o":
                    rank["o"].copy_(tensor[:, 2 * i : 2 * i + 2])
                elif name == "embed":
                    part = tensor[3 * i : 3 * i + 3]
                    rank["embed"][: len(part)].copy_(part)
                elif name == "norm":
                    rank["norm"].copy_(tensor)
                else:
                    start, length = (0, 2) if name == "q.bias" else (2, 2)
                    rank["bias"][start : start + length].copy_(tensor[2 * i : 2 * i + 2] if name == "q.bias" else tensor)

    spread(tagged(SHAPES, CPU))
    maps = [WeightMap(SHAPES, rank, complete=True) for rank in ranks]
    counts = [found.counts for found in maps]
    for found in maps:
        found.set_counts(counts)
    weights = drawn()
    spread(weights.items())
    reads = [found.read(rank) for found, rank in zip(maps, ranks, strict=True)]
    for found in maps:
        assert found.differing(sums(found, weights), reads) == []
    ranks[1]["o"][3, 1] += 1
    reads = [found.read(rank) for found, rank in zip(maps, ranks, strict=True)]
    assert [found.differing(sums(found, weights), reads) for found in maps] == [["o"], ["o"]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda name, t: None if name == "norm" else t, "no tensor of the trainer reaches the engine's parameter norm"),
        (lambda name, t: None if name == "k" else t, "the engine has no place for the trainer's tensor k:"),
        (lambda name, t: t[:3] if name == "embed" else t, "of the 30 elements of the trainer's tensor embed only 18 reach"),
        (lambda name, t: -t if name == "o" else t, "vLLM stores its parameter o in a form"),
        (lambda name, t: t * torch.arange(1, 7) if name == "embed" else t, "vLLM stores its parameter embed in a form"),
    ],
    ids=["unreached", "ignored", "cut", "changed", "scaled by column"],
)
def test_a_loader_that_does_something_else_is_found(change, message):
    def other(into, weights):
        load(into, ((n, c) for n, t in weights if (c := change(n, t)) is not None))

    with pytest.raises(UserError, match=message):
        mapped(targets(), other)


def test_unsent_and_unknown_tensors_differ():
    into = targets()
    found, weights = mapped(into), drawn()
    load(into, weights.items())
    sent = sums(found, weights)
    del sent["q"]
    sent["other"] = torch.tensor(1)
    assert found.differing(sent, [found.read(into)]) == ["q", "other"]


def test_a_checksum_is_the_sum_of_its_parts():
    whole = torch.randn(6, 8)
    for word in (4, 8):
        parts = [checksum(whole[:2], word), checksum(whole[2:, :4], word), checksum(whole[2:, 4:], word)]
        assert sum(map(int, parts)) % 2**64 == int(checksum(whole, word)) % 2**64
    shifted = torch.randn(49)[1:].view(6, 8)  # not where a word of 8 bytes can begin
    assert checksum(shifted, 8) == checksum(shifted.clone(), 8)
