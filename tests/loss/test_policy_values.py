"""Values and derivatives of the losses on sampled answers, worked out by hand: S02, S16, S17 and each paper's formula."""

import math

import pytest
import torch
from policy_cases import changed, count, flat_case, gradients

from twinkle_research.errors import UserError
from twinkle_research.loss import resolve_loss
from twinkle_research.loss.base import LossInputs, TokenScores
from twinkle_research.loss.correction import correction_weights
from twinkle_research.loss.ppo_value import value_objective

L2, L3 = math.log(2), math.log(3)


def one_token(loss, ratio: float, advantage: float, **inputs: float) -> tuple[float, float]:
    """Loss and its derivative by the log-probability of a single token whose ratio to the old policy is ``ratio``."""
    logp = -1.0
    given = {name: [[value]] for name, value in inputs.items()}
    scores, case = flat_case([[logp]], [advantage], old_logprobs=[[logp - math.log(ratio)]], **given)
    out, grads = gradients(loss, scores, case, 1)
    return float(out.loss.detach()), float(grads["logprobs"])


# --- S16: clip and dual clip ----------------------------------------------------------------------------------------------

# A, ratio -> loss and dloss/dlogp, without and with dual clip 3.
CLIP = [
    (1, 0.5, (-0.5, -0.5), (-0.5, -0.5)),
    (1, 1, (-1, -1), (-1, -1)),
    (1, 5, (-1.2, 0), (-1.2, 0)),
    (-1, 0.5, (0.8, 0), (0.8, 0)),
    (-1, 1, (1, 1), (1, 1)),
    (-1, 5, (5, 5), (3, 0)),
]


@pytest.mark.parametrize("name", ["grpo", "bnpo", "ppo", "dr_grpo"])
@pytest.mark.parametrize(("advantage", "ratio", "plain", "dual"), CLIP)
def test_the_clip_table_of_s16(name, advantage, ratio, plain, dual):
    assert one_token(resolve_loss(name, epsilon=0.2), ratio, advantage) == pytest.approx(plain, abs=1e-12)
    assert one_token(resolve_loss(name, epsilon=0.2, dual_clip=3.0), ratio, advantage) == pytest.approx(dual, abs=1e-12)


def test_clip_higher():
    """DAPO: between 1.2 and 1.28 a token with A > 0 still moves."""
    assert one_token(resolve_loss("dapo"), 1.25, 1) == pytest.approx((-1.25, -1.25))
    assert one_token(resolve_loss("grpo"), 1.25, 1) == pytest.approx((-1.2, 0))
    assert one_token(resolve_loss("dapo"), 1.3, 1) == pytest.approx((-1.28, 0))
    assert one_token(resolve_loss("dapo"), 0.75, -1) == pytest.approx((0.8, 0))


def test_clipped_tokens_are_counted_where_their_gradient_is_gone():
    loss = resolve_loss("grpo", dual_clip=3.0)
    for advantage, ratio, low, high in ((1, 5, 0, 1), (-1, 0.5, 1, 0), (-1, 5, 0, 1), (-1, 2, 0, 0), (1, 0.5, 0, 0)):
        scores, inputs = flat_case([[-1.0]], [advantage], old_logprobs=[[-1 - math.log(ratio)]])
        metrics = loss(scores, inputs, 1).metrics
        assert (metrics["ratio/clip_low"][0], metrics["ratio/clip_high"][0]) == (low, high)
        assert metrics["ratio/mean"][0] == pytest.approx(ratio)


# --- S02, S04 and S17 -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["dapo", "bnpo", "cispo", "importance_sampling", "ppo", "reinforce", "grpo", "dr_grpo", "gspo", "rloo"]
)
def test_a_truncated_answer_that_is_masked_leaves_the_denominator_too(name):
    """S02: 4 tokens with loss 0.5 (A = -0.5, ratio 1), 6 tokens of an answer that was cut. Without the mask it is 2.0 / 10 = 0.2
    for a mean over tokens; ``dr_grpo`` divides 4 x 0.5 by its constant length 4."""
    loss = resolve_loss(name, **({"max_completion_length": 4} if name == "dr_grpo" else {}))
    scores, inputs = flat_case([[-1.0] * 4, [-1.0] * 6], [-0.5, 7.0])
    inputs.mask[1] = 0
    out, grads = gradients(loss, scores, inputs, count(loss, inputs))
    assert float(out.loss.detach()) == pytest.approx(-0.5 if name in ("cispo", "reinforce") else 0.5)  # these have -A log p
    assert (grads["logprobs"][1] == 0).all()
    scores, inputs = flat_case([[-1.0] * 4, [-1.0] * 6], [-0.5, 7.0])
    inputs.mask[:] = 0
    out, grads = gradients(loss, scores, inputs, count(loss, inputs))
    assert out.loss == 0 and (grads["logprobs"] == 0).all()


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo", "cispo", "sapo", "rloo", "reinforce", "importance_sampling"])
def test_without_advantage_only_the_kl_moves_the_policy(name):
    """S04, input 2: equal rewards give advantages of exactly 0."""
    rows = [[-1.0, -2.0], [-0.5]]
    reference = [[-1.5, -1.0], [-0.5]]
    plain = resolve_loss(name)
    scores, inputs = flat_case(rows, [0.0, 0.0], ref_logprobs=reference)
    out, grads = gradients(plain, scores, inputs, count(plain, inputs))
    assert out.loss == 0 and (grads["logprobs"] == 0).all()
    with_kl = resolve_loss(name, beta=0.1, **({} if name == "rloo" else {"normalization": "token"}))
    _, grads = gradients(with_kl, scores, inputs, 1)
    # dk3/dlogp = 1 - e^d for d = -0.5, 1 and 0; rloo means over the answer's two tokens.
    expected = 0.1 / (2 if name == "rloo" else 1) * torch.tensor([[1 - math.exp(-0.5), 1 - math.e], [0.0, 0.0]])
    torch.testing.assert_close(grads["logprobs"], expected.double(), rtol=1e-6, atol=1e-12)


def test_the_first_inner_step_of_s17():
    """Ratio 1 everywhere: nothing clipped, no KL to the old policy, and the loss is minus the mean of A over tokens."""
    rows, advantages = [[-0.3, -1.2, -0.7], [-2.0]], [2.0, -1.0]
    for old in ({}, {"old_logprobs": rows}):
        scores, inputs = flat_case(rows, advantages, **old)
        out = resolve_loss("dapo")(scores, inputs, 4)
        assert float(out.loss.detach()) == pytest.approx(-(3 * 2.0 - 1.0) / 4)
        for name, value in {"ratio/mean": 4, "ratio/clip_low": 0, "ratio/clip_high": 0, "kl/old": 0}.items():
            assert out.metrics[name][0] == value


# --- what is summed and what it is divided by -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "normalizer", "value"),
    [
        # Two answers of 3 and 1 tokens with A = 2 and -1: token sums of -A are -6 and 1.
        ("dapo", {}, 4, (-6 + 1) / 4),
        ("grpo", {}, 2, (-6 / 3 + 1) / 2),
        ("grpo", {"normalization": "sequence_sum"}, 2, (-6 + 1) / 2),
        ("dr_grpo", {"max_completion_length": 8}, 16, (-6 + 1) / 16),
        ("rloo", {}, 2, (-2 + 1) / 2),
        ("ppo", {"loss_agg_mode": "token-mean"}, 4, (-6 + 1) / 4),
        ("ppo", {"loss_agg_mode": "seq-mean-token-mean"}, 2, (-2 + 1) / 2),
    ],
)
def test_normalizers(name, options, normalizer, value):
    loss = resolve_loss(name, **options)
    scores, inputs = flat_case([[-1.0, -1.0, -1.0], [-1.0]], [2.0, -1.0])
    assert count(loss, inputs) == normalizer
    assert float(loss(scores, inputs, normalizer).loss.detach()) == pytest.approx(value)


# --- each algorithm -------------------------------------------------------------------------------------------------------


def test_gspo():
    """Ratios 4 and 1 of a two-token answer: s = (4 x 1)^(1/2) = 2. A = 1: clipped to 1.4, no gradient. A = -1: loss 2, and
    equation 5's derivative by each log-probability is -A s / 2 = 1."""
    loss = resolve_loss("gspo", epsilon=0.4, epsilon_high=0.4)
    old = [[-1 - 2 * L2, -1.0]]
    for advantage, value, slope in ((1.0, -1.4, 0.0), (-1.0, 2.0, 1.0)):
        scores, inputs = flat_case([[-1.0, -1.0]], [advantage], old_logprobs=old)
        out, grads = gradients(loss, scores, inputs, 1)
        assert float(out.loss.detach()) == pytest.approx(value)
        assert grads["logprobs"].tolist() == [[pytest.approx(slope)] * 2]


def test_gspo_with_advantages_by_token():
    """GSPO-token, equation 13: each token's derivative is -A_t s / 2, here with s = 2."""
    scores, inputs = flat_case([[-1.0, -1.0]], [1.0], old_logprobs=[[-1 - 2 * L2, -1.0]])
    inputs.advantages = torch.tensor([[-1.0, -3.0]], dtype=torch.float64)
    out, grads = gradients(resolve_loss("gspo", epsilon=0.4, epsilon_high=0.4), scores, inputs, 1)
    assert float(out.loss.detach()) == pytest.approx(2 * (1 + 3) / 2)
    assert grads["logprobs"].tolist() == [[pytest.approx(1.0), pytest.approx(3.0)]]


@pytest.mark.parametrize(
    ("options", "ratio", "weight"),
    [
        ({}, 8.0, 5.0),  # 1 + 4
        ({}, 0.01, 0.01),  # no lower bound
        ({"epsilon": 0.2}, 0.01, 0.8),
        ({"epsilon_high": 0.28}, 8.0, 1.28),
        ({"epsilon_high": None}, 8.0, 8.0),
        ({"clip": "absolute", "epsilon_high": 5.0}, 8.0, 5.0),
        ({"clip": "absolute", "epsilon": 0.5, "epsilon_high": 5.0}, 0.01, 0.5),
    ],
)
@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_cispo_is_weighted_log_likelihood(options, ratio, weight, advantage):
    """-w A log p with log p = -1, and its derivative -w A: no token loses its gradient."""
    value = one_token(resolve_loss("cispo", **options), ratio, advantage)
    assert value == pytest.approx((weight * advantage, -weight * advantage))


@pytest.mark.parametrize("ratio", [0.5, 1.0, 3.0])
@pytest.mark.parametrize(("advantage", "tau"), [(2.0, 1.0), (-2.0, 1.05), (-2.0, 4.0)])
def test_sapo(ratio, advantage, tau):
    """f = 4 s / tau with s = sigmoid(tau (r - 1)), df/dlogp = 4 s (1 - s) r, which is 1 at r = 1 for every tau."""
    loss = resolve_loss("sapo", tau_neg=tau if advantage < 0 else 1.05)
    s = 1 / (1 + math.exp(-tau * (ratio - 1)))
    value, slope = one_token(loss, ratio, advantage)
    assert value == pytest.approx(-advantage * 4 * s / tau)
    assert slope == pytest.approx(-advantage * 4 * s * (1 - s) * ratio)


def test_importance_sampling_and_reinforce():
    assert one_token(resolve_loss("importance_sampling"), 5.0, -2.0) == pytest.approx((10.0, 10.0))
    assert one_token(resolve_loss("reinforce"), 5.0, -2.0) == pytest.approx((-2.0, 2.0))  # -A log p, whatever the ratio
    assert one_token(resolve_loss("reinforce", epsilon=0.2), 5.0, 2.0) == pytest.approx((-2.4, 0.0))


def test_rloo_has_one_ratio_for_the_answer():
    """Ratios 2 and 3: the answer's is 6, its loss -6 A, the derivative by each log-probability -6 A too."""
    old = [[-1 - L2, -1 - L3], [-1.0]]
    scores, inputs = flat_case([[-1.0, -1.0], [-1.0]], [0.5, -1.0], old_logprobs=old)
    out, grads = gradients(resolve_loss("rloo"), scores, inputs, 2)
    assert float(out.loss.detach()) == pytest.approx((-3.0 + 1.0) / 2)
    assert grads["logprobs"].tolist() == [[pytest.approx(-1.5)] * 2, [pytest.approx(0.5), 0.0]]
    out, grads = gradients(resolve_loss("rloo", epsilon=0.2), scores, inputs, 2)
    assert float(out.loss.detach()) == pytest.approx((-0.6 + 1.0) / 2)
    assert grads["logprobs"][0].tolist() == [0.0, 0.0]


def test_on_policy_rloo_is_reinforce_on_whole_answers():
    rows, advantages = [[-0.3, -1.2, -0.7], [-2.0, -0.1]], [2.0, -1.0]
    scores, inputs = flat_case(rows, advantages)
    ours = gradients(resolve_loss("rloo"), scores, inputs, 2)[1]["logprobs"]
    plain = gradients(resolve_loss("reinforce", normalization="sequence_sum"), scores, inputs, 2)[1]["logprobs"]
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=0)


# --- the critic -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "old", "target", "epsilon", "expected", "slope", "clipped"),
    [
        (1.0, 1.0, 3.0, 0.2, 2.0, -2.0, 0),  # (1 - 3)^2 / 2
        (1.5, 1.0, 3.0, 0.2, 1.62, 0.0, 1),  # held at 1.2: (1.2 - 3)^2 / 2, which is the larger
        (0.5, 1.0, 3.0, 0.2, 3.125, -2.5, 0),  # moved away: (0.5 - 3)^2 / 2 is larger than (0.8 - 3)^2 / 2
        (1.5, 1.0, 3.0, None, 1.125, -1.5, 0),
    ],
)
def test_the_clipped_value_loss(value, old, target, epsilon, expected, slope, clipped):
    tensors = [torch.tensor([[x]], dtype=torch.float64) for x in (value, old, target)]
    tensors[0].requires_grad_()
    loss, where = value_objective(*tensors, epsilon)
    assert float(loss.detach()) == pytest.approx(expected) and float(where) == clipped
    assert float(torch.autograd.grad(loss.sum(), tensors[0])[0]) == pytest.approx(slope)


@pytest.mark.parametrize("epsilon", [0.2, None])
def test_values_inside_the_bounds_are_not_clipped(epsilon):
    """Nor counted as such: in float32 old + (value - old) is not always the value."""
    generator = torch.Generator().manual_seed(0)
    old, target = torch.randn(2, 1, 1000, generator=generator)
    value = old + 0.19 * (2 * torch.rand(1, 1000, generator=generator) - 1)
    loss, where = value_objective(value, old, target, epsilon)
    assert not where.any() and torch.equal(loss, (value - target).square() / 2)


def critic_case() -> tuple[TokenScores, LossInputs]:
    given = {"old_values": [[1.0, 0.0], [2.0]], "returns": [[3.0, 0.5], [2.0]]}
    scores, inputs = flat_case([[-1.0, -2.0], [-0.5]], [1.0, -1.0], **given)
    scores.values = torch.tensor([[1.5, 0.1], [2.0, 9.0]], dtype=torch.float64, requires_grad=True)
    return scores, inputs


def test_ppo_adds_the_value_loss():
    scores, inputs = critic_case()
    value = 1.62 + 0.4**2 / 2  # of the second token |0.1 - 0.5| within the clip; the third is 0
    policy = (-1 - 1 + 1) / 3
    out, grads = gradients(resolve_loss("ppo", value_coef=0.1), scores, inputs, 3)
    assert float(out.loss.detach()) == pytest.approx(policy + 0.1 * value / 3)
    assert grads["values"].tolist() == [[0.0, pytest.approx(0.1 * -0.4 / 3)], [0.0, 0.0]]
    assert out.metrics["value/loss"][0] == pytest.approx(value) and out.metrics["value/clip"][0] == 1
    alone = gradients(resolve_loss("ppo_value"), scores, inputs, 3)[0]
    assert float(alone.loss.detach()) == pytest.approx(value / 3)
    assert resolve_loss("ppo").needs == frozenset() and resolve_loss("ppo", value_coef=0.1).needs == {"values"}


# --- correction -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "low", "high", "weights"),
    [
        # Two answers with weights 2, 3 and 1/4 by token, 6 and 1/4 by answer.
        ("tis_token", None, 2.5, [[2, 2.5], [0.25, 1]]),
        ("tis_token", 0.5, 2.5, [[2, 2.5], [0.5, 1]]),
        ("tis_sequence", None, 2.5, [[2.5, 2.5], [0.25, 0.25]]),
        ("mis_token", None, 2.5, [[2, 0], [0.25, 1]]),
        ("mis_sequence", None, 2.5, [[0, 0], [0.25, 0.25]]),
        ("mis_sequence", 0.5, 10.0, [[6, 6], [0, 0]]),
        ("icepop", 0.5, 5.0, [[2, 3], [0, 1]]),
    ],
)
def test_correction_weights(mode, low, high, weights):
    sampler = [[-1 - L2, -1 - L3], [-1 + 2 * L2]]
    scores, inputs = flat_case([[-1.0, -1.0], [-1.0]], [1.0, 1.0], sampler_logprobs=sampler)
    gap = (scores.logprobs - inputs.sampler_logprobs) * inputs.mask
    found = correction_weights(mode, gap, inputs, low, high)
    torch.testing.assert_close(found, torch.tensor(weights, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    assert not found.requires_grad
    # In the loss: weights without gradient on -A, the old policy's gap where it is known, the present one's where not.
    options = {"correction": mode, "correction_low": low, "correction_high": high}
    for old in (None, inputs.mask * -1.0):
        inputs.old_logprobs = old
        out, grads = gradients(resolve_loss("dapo", **options), scores, inputs, 1)
        torch.testing.assert_close(grads["logprobs"], -found * inputs.mask, rtol=1e-12, atol=1e-12)
        assert out.metrics["sampler_gap/mean_abs"][0] == pytest.approx(3 * L2 + L3)
        assert out.maxima["sampler_gap/max"] == pytest.approx(2 * L2)
        assert out.metrics["correction/dropped"][0] == (found * inputs.mask == 0).sum() - 1


def test_the_kl_is_not_corrected():
    case = flat_case([[-1.0]], [0.0], sampler_logprobs=[[-9.0]], ref_logprobs=[[-1.5]])
    loss = resolve_loss("grpo", beta=0.1, kl_estimator="k1", correction="mis_token")
    assert float(loss(*case, 1).loss.detach()) == pytest.approx(0.05)


def test_off_policy_answers_to_forget_are_dropped():
    """Mean of log sampler - log policy: 0.5 for the first two answers, 0.05 for the third. Only a negative A is dropped."""
    rows = [[-1.0, -2.0], [-1.0, -2.0], [-1.0]]
    scores, inputs = flat_case(rows, [-1.0, 1.0, -1.0], sampler_logprobs=[[-0.5, -1.5], [-0.5, -1.5], [-0.95]])
    out, grads = gradients(resolve_loss("dapo", correction_off_policy_threshold=0.1), scores, inputs, 1)
    assert grads["logprobs"].tolist() == [[0.0, 0.0], [-1.0, -1.0], [1.0, 0.0]]
    assert out.metrics["correction/dropped"][0] == 2
    _, grads = gradients(resolve_loss("dapo", correction_off_policy_threshold=0.6), scores, inputs, 1)  # a mean, not a sum of 1
    assert grads["logprobs"].tolist() == [[1.0, 1.0], [-1.0, -1.0], [1.0, 0.0]]


# --- entropy, clamp, missing inputs ---------------------------------------------------------------------------------------


def test_the_entropy_bonus():
    scores, inputs = flat_case([[-1.0, -1.0], [-1.0]], [0.0, 0.0])
    scores.entropy = torch.tensor([[1.0, 2.0], [3.0, 9.0]], dtype=torch.float64, requires_grad=True)
    loss = resolve_loss("dapo", entropy_coef=0.1)
    out, grads = gradients(loss, scores, inputs, 3)
    assert loss.needs == {"entropy"} and float(out.loss.detach()) == pytest.approx(-0.1 * 6 / 3)
    assert grads["entropy"].tolist() == [[pytest.approx(-0.1 / 3)] * 2, [pytest.approx(-0.1 / 3), 0.0]]
    assert float(out.metrics["entropy"][0]) == 6


def test_the_clamp_keeps_a_runaway_ratio_finite():
    for name in ("grpo", "gspo", "importance_sampling", "rloo", "cispo", "sapo"):
        scores, inputs = flat_case([[-1.0]], [-1.0], old_logprobs=[[-2000.0]])
        scores, inputs = changed(scores, inputs, lambda x: x.float() if x.is_floating_point() else x)
        out, grads = gradients(resolve_loss(name), scores, inputs, 1)
        assert torch.isfinite(out.loss) and torch.isfinite(grads["logprobs"]).all()
        assert out.maxima["ratio/max"] == pytest.approx(math.exp(20), rel=1e-5)
    loss = resolve_loss("importance_sampling", log_ratio_clamp=1.0)
    assert one_token(loss, 2.0, 1.0) == pytest.approx((-2.0, -2.0))
    assert one_token(loss, 8.0, 1.0) == pytest.approx((-math.e, 0.0))


@pytest.mark.parametrize(
    ("name", "options", "missing"),
    [
        ("grpo", {}, "advantages"),
        ("grpo", {"beta": 0.1}, "advantages and ref_logps"),
        ("cispo", {"correction": "icepop"}, "advantages and sampler_logps"),
        ("ppo_value", {}, "returns and old_values"),
    ],
)
def test_training_without_an_input_is_refused_and_scoring_is_not(name, options, missing):
    loss = resolve_loss(name, **options)
    scores, inputs = critic_case()
    bare = LossInputs(inputs.mask, inputs.sequence_ids, inputs.num_sequences)
    with pytest.raises(UserError, match=f"needs {missing}"):
        loss(scores, bare, 1)
    with torch.no_grad():
        detached = TokenScores(scores.logprobs.detach(), values=scores.values.detach())
        assert loss(detached, bare, 1).loss == 0


def test_ppo_with_a_critic_needs_returns():
    scores, inputs = critic_case()
    inputs.returns = None
    with pytest.raises(UserError, match="PPOLoss needs returns: pass them to forward_backward"):
        resolve_loss("ppo", value_coef=0.1)(scores, inputs, 1)
