"""One rank of the tests of a projection whose rows lie on several ranks (see ranks.py).

Each rank also scores with all the rows, and writes how far its own results are from that.
"""

import itertools
import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from twinkle_research.distributed.runtime import Runtime
from twinkle_research.model.head import OUTPUTS, LogitTransform, SampledFrom, score_labels
from twinkle_research.model.vocabulary import WHOLE, ShardedVocabulary, Vocabulary

N, D, V = 11, 6, 250
# Rows of each rank, in its order. As padded to 256 and cut; uneven; with a rank that has nothing, at any place.
CUTS = {
    2: [(125, 125), (249, 1), (250, 0), (0, 250)],
    4: [(64, 64, 64, 58), (1, 100, 149, 0), (0, 250, 0, 0)],
}
TRANSFORMS = [LogitTransform(), LogitTransform(0.25), LogitTransform(1.0, 2.0), LogitTransform(3.0, 1.5)]
SAMPLED = ["plain", "tempered", "filtered"]
# (rows, dtype): every cut in float64, the padded ones also in less.
RUNS = [(rows, "float64") for cuts in CUTS.values() for rows in cuts]
RUNS += [(cuts[0], dtype) for cuts in CUTS.values() for dtype in ("float32", "bfloat16")]


class Collectives:
    """Counts the all-reduces of a block."""

    def __enter__(self):
        self.count, self._real = 0, dist.all_reduce
        dist.all_reduce = self
        return self

    def __call__(self, *args, **kwargs):
        self.count += 1
        return self._real(*args, **kwargs)

    def __exit__(self, *_):
        dist.all_reduce = self._real


def inputs(dtype: torch.dtype, bias: bool, seed: int) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    g = torch.Generator().manual_seed(seed)
    hidden, weight, b = (torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype) for shape in ((N, D), (V, D), (V,)))
    hidden *= 0.4  # where a softcap is saturated, float32 says little about its slope, sharded or not
    labels = torch.randint(V, (N,), generator=g)
    labels[:2] = torch.tensor([0, V - 1])
    return hidden, weight, b if bias else None, labels


def sampled_from(kind: str, labels: Tensor, seed: int) -> SampledFrom:
    """Temperatures of each position; kept sets at two of three positions, the label's neighbours at one of them."""
    if kind == "plain":
        return SampledFrom()
    g = torch.Generator().manual_seed(seed)
    temperature = 0.3 + torch.rand(N, generator=g)
    if kind == "tempered":
        return SampledFrom(temperature)
    keep = torch.rand(N, V, generator=g) < 0.1
    keep[1] = False
    keep[1, -5:] = True  # all on one shard
    keep[torch.arange(N), labels] = True
    keep[::3] = False
    return SampledFrom(temperature, *keep.nonzero().unbind(-1))


def score(leaves, labels, vocabulary, chunk, needs, announced, **settings) -> dict[str, Tensor]:
    """Values and gradients by name, of a loss that uses all values; with ``announced`` the loss is that derivative."""
    hidden, weight, bias = leaves
    with Collectives() as forward:
        found = score_labels(
            hidden, weight, labels, bias_V=bias, needs=frozenset(needs), chunk=chunk, vocabulary=vocabulary,
            logprob_gradient_N=announced, **settings,
        )  # fmt: skip
    values = {name: getattr(found, name) for name in OUTPUTS if getattr(found, name) is not None}
    g = torch.Generator().manual_seed(len(needs))
    weights = torch.randn(len(values), N, generator=g, dtype=torch.float64).to(hidden.dtype)
    loss = sum((v * w).sum() for v, w in zip(values.values(), weights))
    if announced is not None:
        loss = (found.logprobs * announced).sum()
    wanted = {n: leaf for n, leaf in zip(("hidden", "weight", "bias"), leaves) if leaf is not None and leaf.requires_grad}
    with Collectives() as backward:
        gradients = torch.autograd.grad(loss, list(wanted.values()))
    expected = 0 if vocabulary is WHOLE else 2 * -(-N // chunk)
    assert (forward.count, backward.count) == (expected, 0)
    return {name: v.detach() for name, v in values.items()} | dict(zip(wanted, gradients, strict=True))


def compare(group, rows: tuple[int, ...], dtype: torch.dtype, case: tuple, seed: int) -> tuple[dict[str, float], Tensor]:
    """Result -> distance of the shard's from the same part of the whole's, relative to all of that; and the values."""
    trained, bias, transform, kind, chunk, needs, announce = case
    hidden, weight, b, labels = inputs(dtype, bias, seed)
    rank = dist.get_rank(group)
    start, stop = sum(rows[:rank]), sum(rows[: rank + 1])
    settings = {"transform": transform, "sampled_from": sampled_from(kind, labels, seed)}

    def run(cut: slice, vocabulary: Vocabulary) -> dict[str, Tensor]:
        parts = (hidden, weight[cut], None if b is None else b[cut])
        leaves = [None if p is None else p.clone().requires_grad_(n) for p, n in zip(parts, (True, trained, trained))]
        announced = torch.linspace(-1, 1, N, dtype=torch.promote_types(dtype, torch.float32)) if announce else None
        return score(leaves, labels, vocabulary, chunk, needs, announced, **settings)

    whole, ours = run(slice(None), WHOLE), run(slice(start, stop), ShardedVocabulary(start, V, group))
    assert whole.keys() == ours.keys()
    dist.all_reduce(ours["hidden"], group=group)
    distances = {}
    for name, mine in ours.items():
        right = whole[name][start:stop] if name in ("weight", "bias") else whole[name]
        assert mine.isfinite().all() and mine.shape == right.shape and mine.dtype == right.dtype
        distances[name] = ((mine.double() - right.double()).norm() / whole[name].double().norm().clamp(min=1e-300)).item()
    return distances, torch.cat([ours[name] for name in OUTPUTS if name in ours])


def cases():
    subsets = [(), ("entropy",), ("logsumexp", "mean_logprobs"), OUTPUTS]
    for case in itertools.product((True, False), (True, False), TRANSFORMS, SAMPLED, (6, 100), subsets, (False, True)):
        trained, bias, transform, kind, chunk, needs, announce = case
        if not (kind == "filtered" and "mean_logprobs" in needs) and not (announce and (needs or not trained)):
            yield case


def main(runtime: Runtime, out: str) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    groups = {2: pairs[runtime.rank // 2], 4: dist.group.WORLD}
    worst: dict[str, dict[str, float]] = {}
    for rows, dtype in RUNS:
        found, seen, group = worst.setdefault(f"{rows} {dtype}", {}), [], groups[len(rows)]
        step = 7 if (rows, dtype) in ((CUTS[2][0], "float64"), (CUTS[4][0], "float64")) else 23
        for number, case in enumerate(itertools.islice(cases(), len(worst) % step, None, step)):
            distances, values = compare(group, rows, getattr(torch, dtype), case, number)
            found |= {name: max(found.get(name, 0.0), distance) for name, distance in distances.items()}
            seen.append(values)
        first = torch.cat(seen)
        dist.broadcast(first, group=group, group_src=0)
        assert torch.equal(first, torch.cat(seen)), "the ranks do not have the same bits"
    Path(out, f"{runtime.rank}.json").write_text(json.dumps(worst))
