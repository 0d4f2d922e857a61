"""The distribution that is sampled from, and the draw (S12)."""

import math

import numpy as np
import pytest
import torch

from twinkle_research.sampler.filter import draw, filter_logits, kept_ids, penalise_repetition


def test_temperature_s12():
    logprobs = filter_logits(torch.tensor([[2.0, 0.0]]), temperature=0.5).log_softmax(-1)
    assert logprobs[0, 0].item() == pytest.approx(-0.018150, abs=1e-6)


def test_greedy_leaves_logits_alone():
    logits = torch.tensor([[2.0, 0.0, -1.0]])
    assert torch.equal(filter_logits(logits, temperature=0, top_k=1, top_p=0.1), logits)


def reference_kept(probs: np.ndarray, top_k: int, top_p: float) -> set[int]:
    """The definition, one token at a time."""
    order = sorted(range(len(probs)), key=lambda i: -probs[i])
    if top_k > 0:
        order = order[:top_k]
    total, kept, reached = sum(probs[i] for i in order), set(), 0.0
    for i in order:
        kept.add(i)
        reached += probs[i] / total
        if reached >= top_p:
            break
    return kept


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
@pytest.mark.parametrize(("top_k", "top_p"), [(-1, 1.0), (5, 1.0), (-1, 0.8), (6, 0.7), (1, 0.5), (500, 0.01)])
def test_kept_set_is_that_of_the_definition(temperature, top_k, top_p):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(20, 37, generator=generator) * 2
    filtered = filter_logits(logits, temperature, top_k, top_p)
    probs = (logits.double() / temperature).softmax(-1).numpy()
    for row in range(20):
        kept = set(filtered[row].isfinite().nonzero().flatten().tolist())
        assert kept == reference_kept(probs[row], top_k, top_p)
        expected = {i: probs[row, i] / sum(probs[row, j] for j in kept) for i in kept}
        got = filtered[row].double().softmax(-1)
        assert all(got[i].item() == pytest.approx(p, rel=1e-5) for i, p in expected.items())


def test_top_k_keeps_ties():
    assert filter_logits(torch.tensor([[1.0, 1.0, 0.0]]), top_k=1).isfinite().tolist() == [[True, True, False]]


def test_bfloat16_logits_are_filtered_in_float32():
    assert filter_logits(torch.ones(1, 4, dtype=torch.bfloat16), temperature=0.3).dtype == torch.float32


def test_draw_gives_each_token_its_share():
    logits = torch.tensor([[0.5, -math.inf, 2.0, -1.0, 0.0]])
    count = 20_000
    uniforms = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    tokens = draw(logits.expand(count, -1), uniforms)
    shares = torch.bincount(tokens, minlength=5).double() / count
    assert torch.allclose(shares, logits[0].double().softmax(-1), atol=1.5 / count)


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
def test_draw_never_leaves_the_kept_set(uniform):
    logits = torch.full((3, 50), -math.inf)
    logits[0, 7], logits[1, 49], logits[2, [3, 30]] = 0.0, -5.0, torch.tensor([1.0, 1.0])
    first, second, third = draw(logits, torch.full((3,), uniform, dtype=torch.float64)).tolist()
    assert (first, second) == (7, 49)
    assert third in (3, 30)


def test_draw_is_inversion_over_a_large_vocabulary():
    """Against one cumulative sum over all tokens, with filtered ones among them, at a size that no block divides."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 5003, generator=generator) * 3
    logits[:20, torch.randperm(5003, generator=generator)[:4000]] = -math.inf
    uniforms = torch.rand(40, generator=generator, dtype=torch.float64)
    cumulative = logits.double().softmax(-1).cumsum(-1)
    expected = torch.searchsorted(cumulative, uniforms.unsqueeze(-1) * cumulative[:, -1:], right=True).squeeze(-1)
    assert torch.equal(draw(logits, uniforms), expected)


def test_top_p_over_a_large_vocabulary():
    """Whether a row needs the whole vocabulary sorted or not, and whatever other rows need, the set is the definition's."""
    generator = torch.Generator().manual_seed(1)
    scales = torch.tensor([0.1, 1.0, 3.0, 8.0] * 4).unsqueeze(-1)
    logits = torch.randn(16, 3000, generator=generator) * scales
    logits[8:] = logits[8:].round()  # ties
    for top_p in (0.3, 0.9, 0.99):
        together = filter_logits(logits, top_p=top_p)
        for row in range(16):
            assert torch.equal(filter_logits(logits[row : row + 1], top_p=top_p)[0], together[row])
            probs = logits[row].double().softmax(-1)
            kept = together[row].isfinite()
            order = logits[row].sort(descending=True, stable=True).indices
            count = int(kept.sum())
            assert set(order[:count].tolist()) == set(kept.nonzero().flatten().tolist()), "the likeliest, of ties the first"
            reached = probs[order].cumsum(-1)
            assert reached[count - 1] >= top_p - 1e-5
            assert count == 1 or reached[count - 2] < top_p + 1e-5


def test_repetition_penalty():
    logits, seen = torch.tensor([[2.0, -2.0, 3.0]]), torch.tensor([[True, True, False]])
    assert penalise_repetition(logits, seen, 2.0).tolist() == [[1.0, -4.0, 3.0]]


def test_kept_ids_are_what_is_not_ruled_out():
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0, 0.0], [5.0, -1.0, 4.0, 4.0, 4.0]])
    assert kept_ids(filter_logits(logits, top_k=2)) == [[1, 2], [0, 2, 3, 4]]  # ties with the second largest stay
    assert kept_ids(filter_logits(logits, top_p=0.3)) == [[1], [0]]
    assert kept_ids(filter_logits(logits)) == [list(range(5))] * 2
