"""KL estimators: the table of S16, and value, sign and size of each one's gradient against the exact KL of a small vocabulary."""

import math

import pytest
import torch

from twinkle_research.loss.kl import ESTIMATORS, kl_estimate

EXACT = {"rtol": 1e-12, "atol": 1e-14}


def estimate(logp: float, ref: float, estimator: str) -> tuple[float, float]:
    """Value and derivative by the policy's log-probability."""
    policy = torch.tensor(logp, dtype=torch.float64, requires_grad=True)
    value = kl_estimate(policy, torch.tensor(ref, dtype=torch.float64), estimator)
    return float(value.detach()), float(torch.autograd.grad(value, policy)[0])


# With d = ref - logp = -0.5: k3 = e^-0.5 + 0.5 - 1 = 0.106531, dk3/dlogp = 1 - e^-0.5; with d = 0.5: k3 = e^0.5 - 1.5 = 0.148721.
@pytest.mark.parametrize(
    ("logp", "ref", "estimator", "value", "slope"),
    [
        (-1.0, -1.5, "k1", 0.5, 1.0),
        (-1.0, -1.5, "k2", 0.125, 0.5),
        (-1.0, -1.5, "k3", 0.106531, 0.393469),
        (-1.5, -1.0, "k1", -0.5, 1.0),
        (-1.5, -1.0, "k2", 0.125, -0.5),
        (-1.5, -1.0, "k3", 0.148721, -0.648721),
        (-1.5, -1.0, "k1_plus", -0.5, -0.5),
        (-1.5, -1.0, "k3_plus", 0.148721, -0.5),
        (-1.0, -1.5, "k1_plus", 0.5, 0.5),
        (-1.0, -1.5, "k3_plus", 0.106531, 0.5),
        (-1.0, -1.0, "k1", 0.0, 1.0),
        *((-1.0, -1.0, estimator, 0.0, 0.0) for estimator in ("k2", "k3", "k1_plus", "k3_plus")),
    ],
)
def test_the_table_of_s16(logp, ref, estimator, value, slope):
    assert estimate(logp, ref, estimator) == pytest.approx((value, slope), abs=5e-7)


@pytest.fixture
def vocabulary():
    """Logits of a policy with gradient, its log-probabilities, and those of a reference, over 6 tokens."""
    generator = torch.Generator().manual_seed(3)
    logits, ref = torch.randn(2, 6, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    return logits, logits.log_softmax(-1), ref.log_softmax(-1)


def slope(value, logits):
    return torch.autograd.grad(value, logits, retain_graph=True)[0]


@pytest.mark.parametrize("estimator", ["k1", "k3", "k1_plus", "k3_plus"])
def test_the_expected_value_is_the_kl(vocabulary, estimator):
    _, logp, ref = vocabulary
    kl = (logp.exp() * (logp - ref)).sum()
    torch.testing.assert_close((logp.exp() * kl_estimate(logp, ref, estimator)).sum(), kl, **EXACT)


@pytest.mark.parametrize("estimator", ["k2", "k1_plus", "k3_plus"])
def test_the_expected_gradient_of_k2_and_of_straight_through_forms_is_that_of_the_kl(vocabulary, estimator):
    logits, logp, ref = vocabulary
    drawn_from = logp.exp().detach()
    ours = slope((drawn_from * kl_estimate(logp, ref, estimator)).sum(), logits)
    torch.testing.assert_close(ours, slope((logp.exp() * (logp - ref)).sum(), logits), **EXACT)


def test_the_expected_gradient_of_k3_is_that_of_the_other_kl(vocabulary):
    logits, logp, ref = vocabulary
    ours = slope((logp.exp().detach() * kl_estimate(logp, ref, "k3")).sum(), logits)
    torch.testing.assert_close(ours, slope((ref.exp() * (ref - logp)).sum(), logits), **EXACT)


def test_the_expected_gradient_of_k1_is_0(vocabulary):
    logits, logp, ref = vocabulary
    ours = slope((logp.exp().detach() * kl_estimate(logp, ref, "k1")).sum(), logits)
    torch.testing.assert_close(ours, torch.zeros_like(ours), **EXACT)


@pytest.mark.parametrize("estimator", ["k2", "k3", "k1_plus", "k3_plus"])
def test_a_step_down_the_gradient_brings_the_policy_closer(vocabulary, estimator):
    logits, logp, ref = vocabulary
    step = -0.1 * slope((logp.exp().detach() * kl_estimate(logp, ref, estimator)).sum(), logits)
    after = (logits + step).log_softmax(-1)

    def kl(p, q):
        return (p.exp() * (p - q)).sum()

    assert kl(after, ref) < kl(logp, ref) and kl(ref, after) < kl(ref, logp)


def test_close_policies_lose_no_digits_in_float32():
    """k3 = d^2 / 2 and dk3/dlogp = -d up to d^3; e^d - d - 1 gives 0, or 1e-7, for both of these."""
    for d in (1e-4, 3e-6):
        policy = torch.tensor(0.0, requires_grad=True)
        value = kl_estimate(policy, torch.tensor(d), "k3")
        assert float(torch.autograd.grad(value, policy)[0]) == pytest.approx(-d, rel=1e-3)
        assert 0 <= float(value.detach()) == pytest.approx(d * d / 2, rel=1e-1, abs=1e-12)


def test_the_clamp_keeps_k3_finite():
    policy = torch.tensor(-200.0, requires_grad=True)
    assert not math.isfinite(float(kl_estimate(policy, torch.tensor(0.0), "k3").detach()))
    value = kl_estimate(policy, torch.tensor(0.0), "k3", clamp=20.0)
    assert float(value.detach()) == pytest.approx(math.expm1(20) - 20)
    assert torch.autograd.grad(value, policy)[0] == 0


def test_an_unknown_estimator_is_refused():
    assert len(ESTIMATORS) == 5
    with pytest.raises(ValueError, match="valid: k1, k2, k3"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")
