"""What must be true of every loss on sampled answers, for any batch. Float64, bound 1e-12."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_cases import LOSSES, changed, count, gradients, loss_of, random_case

from twinkle_research.loss import resolve_loss
from twinkle_research.loss.kl import kl_estimate

EXACT = {"rtol": 1e-12, "atol": 1e-13}
CASES = settings(max_examples=12, deadline=None, derandomize=True)
SEEDS = st.integers(0, 2**32)
each_loss = pytest.mark.parametrize("name", LOSSES)


def close(ours, other, **bounds):
    torch.testing.assert_close(ours, other, **(EXACT | bounds))


@each_loss
@CASES
@given(seed=SEEDS, cuts=st.sets(st.integers(1, 4)))
def test_micro_batches_change_nothing(name, seed, cuts):
    scores, inputs = random_case(seed, by_token=seed % 2 == 0)
    loss = loss_of(name)
    n = count(loss, inputs)
    whole, grads = gradients(loss, scores, inputs, n)
    bounds = [0, *sorted(cuts), len(inputs.mask)]
    parts = [slice(a, b) for a, b in zip(bounds, bounds[1:])]
    found = []
    for part in parts:
        piece = changed(scores, inputs, lambda x, part=part: x[part])
        piece[1].num_sequences = len(piece[1].mask)
        piece[1].sequence_ids = piece[1].sequence_ids - piece[1].sequence_ids[0, 0]
        found.append(gradients(loss, *piece, n))
    assert sum(count(loss, changed(scores, inputs, lambda x, part=part: x[part])[1]) for part in parts) == n
    close(sum(out.loss for out, _ in found), whole.loss)
    close(torch.cat([out.sequence_losses for out, _ in found]), whole.sequence_losses)
    for field, grad in grads.items():
        close(torch.cat([g[field] for _, g in found]), grad)
    for metric, (total, tokens) in whole.metrics.items():
        close(sum(out.metrics[metric][0] for out, _ in found), total)
        close(sum(out.metrics[metric][1] for out, _ in found), tokens)
    for metric, value in whole.maxima.items():
        close(max(out.maxima[metric] for out, _ in found), value)


@each_loss
@CASES
@given(seed=SEEDS)
def test_packing_and_padding_change_nothing(name, seed):
    scores, inputs = random_case(seed, by_token=seed % 2 == 0)
    loss = loss_of(name)
    n = count(loss, inputs)
    out, grads = gradients(loss, scores, inputs, n)
    rows, length = inputs.mask.shape
    packed = changed(scores, inputs, lambda x: x.reshape(1, rows * length))
    wider = changed(
        scores, inputs, lambda x: torch.cat([x, x[:, -1:].expand(rows, 3) * 0 if x.is_floating_point() else x[:, -3:]], 1)
    )
    packed_out, packed_grads = gradients(loss, *packed, n)
    wider_out, wider_grads = gradients(loss, *wider, n)
    close(packed_out.loss, out.loss)
    close(wider_out.loss, out.loss)
    for field, grad in grads.items():
        close(packed_grads[field].reshape(rows, length), grad)
        close(wider_grads[field][:, :length], grad)


@each_loss
@CASES
@given(seed=SEEDS, order=st.permutations(range(5)))
def test_the_order_of_rows_does_not_matter(name, seed, order):
    scores, inputs = random_case(seed)
    loss = loss_of(name)
    n = count(loss, inputs)
    out, grads = gradients(loss, scores, inputs, n)
    moved = changed(scores, inputs, lambda x: x[list(order)])
    moved[1].sequence_ids = inputs.sequence_ids
    moved_out, moved_grads = gradients(loss, *moved, n)
    close(moved_out.loss, out.loss)
    close(moved_out.sequence_losses, out.sequence_losses[list(order)])
    for field, grad in grads.items():
        close(moved_grads[field], grad[list(order)])


@each_loss
@CASES
@given(seed=SEEDS, garbage=st.sampled_from([float("nan"), float("inf"), -float("inf"), 1e300]))
def test_what_is_not_trained_never_matters(name, seed, garbage):
    scores, inputs = random_case(seed)
    loss = loss_of(name)
    n = count(loss, inputs)
    out, grads = gradients(loss, scores, inputs, n)
    idle = inputs.mask == 0

    def spoil(x):
        return x.masked_fill(idle, garbage) if x.is_floating_point() else x

    spoiled = changed(scores, inputs, spoil)
    spoiled[1].mask = inputs.mask
    spoiled_out, spoiled_grads = gradients(loss, *spoiled, n)
    close(spoiled_out.loss, out.loss)
    for field, grad in grads.items():
        close(spoiled_grads[field], grad)
        assert (grad[idle] == 0).all()
    assert all(torch.isfinite(total) for total, _ in spoiled_out.metrics.values())


@each_loss
def test_with_nothing_to_train_loss_and_gradient_are_exactly_0(name):
    scores, inputs = random_case(0)
    inputs.mask = torch.zeros_like(inputs.mask)
    loss = loss_of(name)
    assert count(loss, inputs) == 0
    out, grads = gradients(loss, scores, inputs, 0)
    assert out.loss == 0 and all((grad == 0).all() for grad in grads.values())


ON_POLICY = [name for name in LOSSES if name != "ppo_value"]


@pytest.mark.parametrize("name", ON_POLICY)
@CASES
@given(seed=SEEDS)
def test_without_old_logprobs_the_ratio_is_1_with_gradient(name, seed):
    scores, inputs = random_case(seed)
    inputs = replace(inputs, old_logprobs=None)
    out, _ = gradients(loss_of(name), scores, inputs, 1)
    total, tokens = out.metrics["ratio/mean"]
    assert total == tokens and out.maxima["ratio/max"] == 1
    assert all(out.metrics[clip][0] == 0 for clip in ("ratio/clip_low", "ratio/clip_high") if clip in out.metrics)
    # The same as passing what the policy says now.
    same = replace(inputs, old_logprobs=scores.logprobs.detach())
    ours, theirs = gradients(loss_of(name), scores, inputs, 1)[1], gradients(loss_of(name), scores, same, 1)[1]
    for field, grad in ours.items():
        close(grad, theirs[field])


@pytest.mark.parametrize(
    "name", ["grpo", "dapo", "gspo", "cispo", "sapo", "ppo, critic", "reinforce, clipped", "rloo", "rloo, clipped"]
)
@CASES
@given(seed=SEEDS, by_token=st.booleans())
def test_the_gradient_that_is_announced_is_the_gradient(name, seed, by_token):
    scores, inputs = random_case(seed, by_token=by_token)
    inputs = replace(inputs, old_logprobs=None)
    loss = loss_of(name)
    n = count(loss, inputs)
    announced = loss.logprob_gradient(inputs, n)
    close(announced, gradients(loss, scores, inputs, n)[1]["logprobs"])


@CASES
@given(seed=SEEDS)
def test_reinforce_announces_its_gradient_off_policy_too(seed):
    scores, inputs = random_case(seed)
    loss = loss_of("reinforce")
    loss.off_policy_threshold = None
    close(loss.logprob_gradient(inputs, 3), gradients(loss, scores, inputs, 3)[1]["logprobs"])


@pytest.mark.parametrize(
    "option",
    [{"beta": 0.1}, {"entropy_coef": 0.1}, {"correction": "tis_token"}, {"correction_off_policy_threshold": 0.1}, {}],
    ids=str,
)
def test_a_gradient_that_depends_on_the_scores_is_not_announced(option):
    _, inputs = random_case(0)
    on_policy = replace(inputs, old_logprobs=None)
    loss = resolve_loss("grpo", **option)
    assert (loss.logprob_gradient(on_policy, 1) is None) == bool(option)
    assert loss.logprob_gradient(inputs, 1) is None
    assert loss.logprob_gradient(replace(on_policy, advantages=None), 1) is None


# Straight-through and detached terms have, on purpose, another gradient than that of their value.
SMOOTH = ["grpo", "dapo", "ppo, critic", "sapo", "importance_sampling", "rloo", "reinforce, clipped", "ppo_value", "bnpo"]


@pytest.mark.parametrize("name", SMOOTH)
@settings(max_examples=4, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1000))
def test_the_gradient_is_that_of_the_value(name, seed):
    scores, inputs = random_case(seed, rows=3, length=4)
    loss = loss_of(name)
    grads = gradients(loss, scores, inputs, 3)[1]
    for field in ("logprobs", "values"):
        leaf = getattr(scores, field)
        for b, t in inputs.mask.nonzero().tolist():
            step = torch.zeros_like(leaf)
            step[b, t] = 1e-6
            sides = [
                loss(replace(scores, **{field: (leaf + sign * step).detach().requires_grad_()}), inputs, 3).loss
                for sign in (1, -1)
            ]
            close((sides[0] - sides[1]) / 2e-6, grads[field][b, t], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@settings(max_examples=40, deadline=None, derandomize=True)
@given(logp=st.floats(-30, 0), gap=st.floats(-12, 12), scale=st.sampled_from([1.0, 1e-3, 1e-6, 1e-9]))
def test_k2_and_k3_are_never_negative(dtype, logp, gap, scale):
    policy = torch.tensor(logp, dtype=dtype, requires_grad=True)
    reference = torch.tensor(logp + gap * scale, dtype=dtype)
    for estimator in ("k2", "k3", "k3_plus"):
        kl = kl_estimate(policy, reference, estimator, clamp=20.0)
        assert kl >= 0
        (slope,) = torch.autograd.grad(kl, policy)
        # Pulls the policy towards the reference: it falls where the policy is above it.
        assert torch.sign(slope) == torch.sign(policy.detach() - reference)
