"""Rows of ids and measures that the tests of the model share: no downloads, no tokenizer."""

import random

import torch

VOCABULARY = 97


def make_rows(count: int, *, seed: int = 0, low: int = 4, high: int = 14, masked: float = 0.4, vocabulary: int = VOCABULARY):
    """Features of uneven length with pre-shifted labels; the last position never has one."""
    rng = random.Random(seed)
    rows = []
    for i in range(count):
        length = rng.randint(low, high)
        ids = [rng.randrange(vocabulary) for _ in range(length)]
        labels = [ids[t + 1] if t + 1 < length and rng.random() >= masked else -100 for t in range(length)]
        if length > 1:
            labels[0] = ids[1]
        rows.append({"input_ids": ids, "labels": labels, "length": length, "sample_index": i, "row": f"rows.jsonl:{i + 1}"})
    return rows


def relative_distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Relative L2 distance of two sets of tensors."""
    assert a.keys() == b.keys() and a
    difference = sum((a[k].double() - b[k].double()).square().sum() for k in a)
    return float((difference / sum(a[k].double().square().sum() for k in a)).sqrt())
