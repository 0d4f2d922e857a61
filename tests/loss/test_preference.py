"""Preference losses: values worked out by hand, the direction of every gradient, and that no cut of a step changes them."""

import math
from dataclasses import replace

import pytest
import torch
from pair_rows import packed, part, random_pairs

from twinkle_research.errors import ConfigError, DataError, UserError
from twinkle_research.loss import build_loss, resolve_loss
from twinkle_research.loss.base import LossInputs, TokenScores
from twinkle_research.loss.config import CPOConfig, DPOConfig, DPOLossType, KTOPairConfig, ORPOConfig, SimPOConfig
from twinkle_research.loss.orpo import log_one_minus_exp

LOSSES = {
    "sigmoid": ("dpo", {}),
    "smoothed": ("dpo", {"label_smoothing": 0.2, "sft_weight": 0.5}),
    "hinge": ("dpo", {"loss_type": "hinge", "beta": 0.05}),
    "ipo": ("dpo", {"loss_type": "ipo"}),
    "ipo-mean": ("dpo", {"loss_type": "ipo", "average_logps": True, "beta": 0.7}),
    "reference-free": ("dpo", {"reference_free": True}),
    "simpo": ("simpo", {}),
    "orpo": ("orpo", {"lambda_orpo": 0.5}),
    "cpo": ("cpo", {}),
    "kto_pair": ("kto_pair", {}),
}
each_loss = pytest.mark.parametrize(("name", "options"), LOSSES.values(), ids=LOSSES)


def sigma(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def one_pair(chosen, rejected, ref_chosen=(), ref_rejected=(), baselines=None):
    """Log-probabilities a token of the two answers, padded to one length."""
    width = max(len(chosen), len(rejected))

    def padded(*rows):
        return torch.tensor([[*row, *[0.0] * (width - len(row))] for row in rows], dtype=torch.float64)

    mask = padded([1.0] * len(chosen), [1.0] * len(rejected))
    reference = padded(ref_chosen, ref_rejected) if ref_chosen else None
    baseline = None if baselines is None else torch.tensor(baselines, dtype=torch.float64)[:, None] * mask
    ids = torch.arange(2)[:, None].expand(2, width).contiguous()
    inputs = LossInputs(mask, ids, 2, ref_logprobs=reference, baselines=baseline)
    return TokenScores(padded(chosen, rejected).requires_grad_()), inputs


# The policy gives the answers -3 (two tokens) and -4 (one), the reference -2 and -6: log-ratios -1 and 2, h = -3.
PAIR = ((-1.0, -2.0), (-4.0,), (-1.5, -0.5), (-6.0,))


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("dpo", {}, -math.log(sigma(-0.3))),
        ("dpo", {"label_smoothing": 0.1}, -0.9 * math.log(sigma(-0.3)) - 0.1 * math.log(sigma(0.3))),
        ("dpo", {"beta": 0.5, "sft_weight": 2.0}, -math.log(sigma(-1.5)) + 2.0 * 1.5),  # nll: (1 + 2) / 2
        ("dpo", {"loss_type": "hinge"}, 1.3),
        ("dpo", {"loss_type": "ipo"}, (-3.0 - 5.0) ** 2),  # beta does not multiply h
        ("dpo", {"loss_type": "ipo", "beta": 0.25}, (-3.0 - 2.0) ** 2),
        ("dpo", {"loss_type": "ipo", "average_logps": True}, (-0.5 - 2.0 - 5.0) ** 2),
        ("dpo", {"reference_free": True}, -math.log(sigma(0.1))),  # -3 + 4
        ("simpo", {}, -math.log(sigma(2.5 * (-1.5 + 4.0) - 0.5))),
        ("cpo", {}, -math.log(sigma(0.1)) + 1.5),
        # odds of exp(-1.5) and exp(-4)
        ("orpo", {}, 1.5 - 0.1 * math.log(sigma(math.log(1 / (math.e**1.5 - 1)) - math.log(1 / (math.e**4 - 1))))),
        ("kto_pair", {}, (sigma(0.1) + sigma(0.2)) / 2),
    ],
)  # fmt: skip
def test_values_by_hand(name, options, expected):
    scores, inputs = one_pair(*PAIR)
    out = resolve_loss(name, **options)(scores, inputs, 1)
    assert out.loss.item() == pytest.approx(expected, rel=1e-12)
    assert out.sequence_losses.tolist() == pytest.approx([expected] * 2, rel=1e-12)
    assert out.metrics["rewards/accuracies"][0].item() == float(name in ("simpo", "cpo", "orpo") or "reference_free" in options)
    assert [out.metrics[f"logps/{side}"][0].item() for side in ("chosen", "rejected")] == [-3.0, -4.0]
    assert {count.item() for _, count in out.metrics.values()} == {1.0}


def test_kto_compares_each_answer_with_the_step():
    """z is 0.5 for chosen rows and 1.5 for rejected ones: sigmoid(-beta (-1 - 0.5)) and sigmoid(beta (2 - 1.5))."""
    scores, inputs = one_pair(*PAIR, baselines=[0.5, 1.5])
    out = resolve_loss("kto_pair", beta=2.0)(scores, inputs, 1)
    assert out.loss.item() == pytest.approx((sigma(3.0) + sigma(1.0)) / 2, rel=1e-12)
    assert out.metrics["rewards/margins"][0].item() == pytest.approx(-6.0)


def test_the_reports_are_means_over_pairs():
    scores, inputs = random_pairs(0)
    metrics = resolve_loss("dpo", beta=0.2, sft_weight=1.0)(scores, inputs, 5).metrics
    ratio = 0.2 * ((scores.logprobs - inputs.ref_logprobs) * inputs.mask).sum(1)
    means = {name: (total / count).item() for name, (total, count) in metrics.items()}
    assert means["rewards/chosen"] == pytest.approx(ratio[::2].mean().item())
    assert means["rewards/rejected"] == pytest.approx(ratio[1::2].mean().item())
    assert means["rewards/margins"] == pytest.approx((ratio[::2] - ratio[1::2]).mean().item())
    assert means["rewards/accuracies"] == (ratio[::2] > ratio[1::2]).double().mean().item()
    tokens = inputs.mask[::2].sum(1)
    assert means["nll"] == pytest.approx(-(scores.logprobs.sum(1)[::2] / tokens).mean().item())


@each_loss
def test_the_gradient_is_that_of_finite_differences(name, options):
    scores, inputs = random_pairs(1, pairs=2, length=5)
    loss = resolve_loss(name, **options)
    assert torch.autograd.gradcheck(lambda logprobs: loss(TokenScores(logprobs), inputs, 2).loss, scores.logprobs)


@each_loss
def test_every_step_down_raises_the_chosen_and_lowers_the_rejected_answer(name, options):
    scores, inputs = random_pairs(2)
    resolve_loss(name, **options)(scores, inputs, 5).loss.backward()
    gradient, trained = scores.logprobs.grad, inputs.mask.bool()
    assert (gradient[~trained] == 0).all()
    assert (gradient[::2][trained[::2]] < 0).all()
    assert (gradient[1::2][trained[1::2]] > 0).all()


def test_ipo_and_hinge_stop_at_their_margin():
    """Unlike the sigmoid's, which never ends: IPO's gradient is 0 at h = 1 / (2 beta) and turns, hinge's ends at 1 / beta."""
    for h, ipo_sign, hinge_sign in ((4.0, -1, -1), (5.0, 0, -1), (6.0, 1, -1), (11.0, 1, 0)):
        for options, sign in (({"loss_type": "ipo"}, ipo_sign), ({"loss_type": "hinge"}, hinge_sign)):
            scores, inputs = one_pair((-1.0,), (-1.0,), (-1.0 - h,), (-1.0,))
            resolve_loss("dpo", **options)(scores, inputs, 1).loss.backward()
            assert torch.sign(scores.logprobs.grad).tolist() == [[sign], [-sign]]


@each_loss
@pytest.mark.parametrize("seed", range(5))
def test_pairs_may_be_cut_into_any_calls_and_packed(name, options, seed):
    loss = resolve_loss(name, **options)
    scores, inputs = random_pairs(seed, pairs=6)
    if loss.needs_baselines:
        inputs = replace(inputs, baselines=torch.tensor([0.7, 0.2] * 6, dtype=torch.float64)[:, None] * inputs.mask)
    inputs.mask[4:6] = 0  # a pair without a trained token: as if it were not there
    scores = TokenScores((scores.logprobs.detach() * inputs.mask).requires_grad_())
    whole = loss(scores, inputs, 5)
    (gradient,) = torch.autograd.grad(whole.loss, scores.logprobs)
    assert whole.metrics["rewards/margins"][1].item() == 5
    assert whole.sequence_losses[4:6].tolist() == [0.0, 0.0]

    for cut in ([(0, 1), (1, 4), (4, 6)], [(0, 3), (3, 6)], [(i, i + 1) for i in range(6)]):
        parts = [loss(*part(scores, inputs, *place), 5) for place in cut]
        total = sum(out.loss for out in parts)
        assert total.item() == pytest.approx(whole.loss.item(), rel=1e-12)
        assert torch.allclose(torch.autograd.grad(total, scores.logprobs)[0], gradient, rtol=1e-12, atol=1e-15)
        for metric, (value, count) in whole.metrics.items():
            assert sum(out.metrics[metric][0] for out in parts).item() == pytest.approx(value.item(), rel=1e-12, abs=1e-14)
            assert sum(out.metrics[metric][1] for out in parts) == count

    inputs.mask[4:6, 3] = scores.logprobs.detach()[4:6, 3] * 0 + 1  # a row of a pack has a trained token
    padded, together = loss(scores, inputs, 6), loss(*packed(scores, inputs), 6)
    assert together.loss.item() == pytest.approx(padded.loss.item(), rel=1e-12)


def test_pairs_are_counted_and_half_a_pair_is_refused():
    loss = resolve_loss("dpo")
    answer, nothing = {"labels": [5, -100]}, {"labels": [-100, -100]}
    assert loss.count([answer, answer, nothing, nothing, answer, answer]) == 2
    assert loss.count([]) == 0
    with pytest.raises(DataError, match="rows.jsonl:3: the rejected answer has no trained token"):
        loss.count([answer, answer, answer | {"row": "rows.jsonl:3"}, nothing])
    with pytest.raises(UserError, match="DPOLoss takes pairs"):
        loss.count([answer])
    scores, inputs = random_pairs(0)
    with pytest.raises(UserError, match="DPOLoss takes pairs, chosen before rejected, but got 9 rows"):
        loss(scores, replace(inputs, num_sequences=9), 1)


@pytest.mark.parametrize("name", ["dpo", "kto_pair"])
def test_a_missing_reference_is_never_taken_for_zero_loss(name):
    scores, inputs = random_pairs(0)
    with pytest.raises(UserError, match="pass ref_logps"):
        resolve_loss(name)(scores, replace(inputs, ref_logprobs=None), 5)


def test_log_ratios_keep_the_digits_of_long_answers():
    """Two sums of 4,000 log-probabilities are some 8,000 in size, where float32 has a resolution of 5e-4."""
    generator = torch.Generator().manual_seed(0)
    reference = -(4 * torch.rand(2, 4000, generator=generator, dtype=torch.float64)).float()
    policy = reference + torch.tensor([[1e-5], [-1e-5]])
    ids = torch.arange(2)[:, None].expand(2, 4000).contiguous()
    inputs = LossInputs(torch.ones(2, 4000), ids, 2, ref_logprobs=reference)
    exact = (policy.double() - reference.double()).sum(1)
    margin = resolve_loss("dpo", beta=1.0)(TokenScores(policy), inputs, 1).metrics["rewards/margins"][0]
    assert margin.item() == pytest.approx((exact[0] - exact[1]).item(), rel=1e-5)


def test_odds_of_answers_that_are_certain_or_impossible():
    for x in (-1e-12, -1e-6, -0.3, -math.log(2), -1.0, -40.0):
        ours = log_one_minus_exp(torch.tensor(x, dtype=torch.float64)).item()
        assert ours == pytest.approx(math.log(-math.expm1(x)) if x > -1 else math.log1p(-math.exp(x)), rel=1e-12)
    for chosen, rejected in ((0.0, -100.0), (-100.0, 0.0), (0.0, 0.0)):
        scores, inputs = one_pair((chosen,), (rejected,))
        out = resolve_loss("orpo")(scores, inputs, 1)
        out.loss.backward()
        assert torch.isfinite(out.loss) and torch.isfinite(scores.logprobs.grad).all()


def test_configs_build_their_losses():
    dpo = build_loss(DPOConfig(loss_type=DPOLossType.ipo, beta=0.3, average_logps=True, sft_weight=0.5))
    assert (dpo.loss_type, dpo.beta, dpo.average_logps, dpo.sft_weight, dpo.needs_reference) == ("ipo", 0.3, True, 0.5, True)
    assert not build_loss(DPOConfig(reference_free=True)).needs_reference
    assert build_loss(SimPOConfig(gamma=1.0)).gamma == 1.0
    assert build_loss(ORPOConfig(lambda_orpo=0.2)).lambda_orpo == 0.2
    assert build_loss(CPOConfig(bc_coef=0.0)).bc_coef == 0.0
    assert build_loss(KTOPairConfig(beta=0.4)).beta == 0.4
    assert (resolve_loss("SimPOLoss").beta, resolve_loss("SimPOLoss").gamma) == (2.5, 0.5)  # Twinkle's


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("dpo", {"beta": 0.0}, "loss.beta must be finite and > 0"),
        ("dpo", {"loss_type": "sigmiod"}, "did you mean 'sigmoid'"),
        ("dpo", {"loss_type": "kto_pair"}, "KTOPairLoss"),
        ("dpo", {"label_smoothing": 0.5}, r"in \[0, 0.5\)"),
        ("dpo", {"label_smoothing": 0.1, "loss_type": "ipo"}, "sigmoid only"),
        ("dpo", {"average_logps": True}, "belongs to ipo"),
        ("dpo", {"sft_weight": -1.0}, "loss.sft_weight must be finite and >= 0"),
        ("simpo", {"gamma": float("nan")}, "loss.gamma"),
        ("orpo", {"lambda_orpo": 0.0}, "loss.lambda_orpo"),
        ("cpo", {"bc_coef": float("inf")}, "loss.bc_coef"),
        ("kto_pair", {"beta": -1.0}, "loss.beta"),
    ],
)
def test_impossible_options_are_refused(name, options, text):
    with pytest.raises(ConfigError, match=text):
        resolve_loss(name, **options)
