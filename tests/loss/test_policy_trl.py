"""The same numbers as TRL 1.16 in float64, to 1e-10: its losses and their gradients, its KL, its advantages, its corrections.

TRL divides by each micro-batch's tokens or rows where ours are those of the optimizer step; here a step is one micro-batch.
It counts a row without tokens in a mean over rows, so that there are none here.
"""

from dataclasses import replace

import pytest
import torch
from policy_cases import count, gradients, random_case
from trl_live import trl_experience, trl_loss, trl_module, trl_rloo_loss

from twinkle_research.advantage import GRPOAdvantage, RLOOAdvantage, Rollouts
from twinkle_research.loss import resolve_loss
from twinkle_research.loss.correction import correction_weights

CLOSE = {"rtol": 1e-10, "atol": 1e-10}
SEEDS = range(3)


@pytest.fixture(scope="module", autouse=True)
def installed():
    trl_module("grpo_trainer")


def case(seed, **options):
    scores, inputs = random_case(seed, rows=6, **options)
    full = inputs.mask.clone()
    full[:, 0] = 1  # no empty row
    return scores, replace(inputs, mask=full, sampler_logprobs=None)


def compare(scores, inputs, loss, loss_type, **settings):
    ours, grads = gradients(loss, scores, inputs, count(loss, inputs))
    theirs, metrics = trl_loss(scores, inputs, loss_type, **settings)
    torch.testing.assert_close(ours.loss, theirs, **CLOSE)
    found = torch.autograd.grad(theirs, [scores.logprobs, scores.entropy], allow_unused=True)
    for name, grad in zip(("logprobs", "entropy"), found, strict=True):
        torch.testing.assert_close(grads[name], torch.zeros_like(grads[name]) if grad is None else grad, **CLOSE)
    return ours, metrics


# Ours with its options, and TRL's loss type with its settings.
SAME = [
    ("grpo", {}, "grpo", {}),
    ("grpo", {"epsilon": 0.1, "epsilon_high": 0.3}, "grpo", {"epsilon": 0.1, "epsilon_high": 0.3}),
    ("grpo", {"beta": 0.04}, "grpo", {"beta": 0.04}),
    ("grpo", {"dual_clip": 1.5}, "grpo", {"delta": 1.5}),
    ("bnpo", {"beta": 0.04}, "bnpo", {"beta": 0.04}),
    ("bnpo", {"entropy_coef": 0.03}, "bnpo", {"entropy_coef": 0.03}),
    ("dr_grpo", {"max_completion_length": 16, "beta": 0.04}, "dr_grpo", {"beta": 0.04}),
    ("dapo", {}, "dapo", {"epsilon_high": 0.28}),
    ("dapo", {"beta": 0.1, "entropy_coef": 0.03, "dual_clip": 2.0}, "dapo",
     {"epsilon_high": 0.28, "beta": 0.1, "entropy_coef": 0.03, "delta": 2.0}),
    ("cispo", {}, "cispo", {"epsilon_high": 5.0}),
    ("cispo", {"clip": "absolute", "epsilon_high": 1.1, "beta": 0.1}, "cispo", {"epsilon_high": 1.1, "beta": 0.1}),
    ("sapo", {}, "sapo", {}),
    ("sapo", {"tau_pos": 2.0, "tau_neg": 3.0, "beta": 0.1}, "sapo",
     {"sapo_temperature_pos": 2.0, "sapo_temperature_neg": 3.0, "beta": 0.1}),
    ("gspo", {}, "grpo", {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4}),
    ("gspo", {"epsilon": 0.1, "epsilon_high": 0.2, "beta": 0.1}, "grpo",
     {"importance_sampling_level": "sequence", "epsilon": 0.1, "epsilon_high": 0.2, "beta": 0.1}),
    ("ppo", {"normalization": "sequence"}, "grpo", {}),
    ("reinforce", {"epsilon": 0.2}, "bnpo", {}),
]  # fmt: skip


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("name", "options", "loss_type", "settings"), SAME)
def test_losses_and_gradients(name, options, loss_type, settings, seed):
    scores, inputs = case(seed)
    ours, metrics = compare(scores, inputs, resolve_loss(name, **options), loss_type, **settings)
    for their_name, our_name in {"kl": "kl/mean", "entropy": "entropy"}.items():
        if their_name in metrics:
            total, tokens = ours.metrics[our_name]
            assert float(total / tokens) == pytest.approx(metrics[their_name], abs=1e-12)
    if name in ("grpo", "dapo") and "dual_clip" not in options:  # theirs counts ratios that delta has cut as not clipped
        for side in ("low", "high"):
            total, tokens = ours.metrics[f"ratio/clip_{side}"]
            assert float(total / tokens) == pytest.approx(metrics[f"clip_ratio/{side}_mean"])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["grpo", "dapo"])
def test_advantages_by_token(name, seed):
    scores, inputs = case(seed, by_token=True)
    compare(scores, inputs, resolve_loss(name, epsilon_high=0.28), name, epsilon_high=0.28)


@pytest.mark.parametrize("seed", SEEDS)
def test_without_old_logprobs(seed):
    scores, inputs = case(seed)
    inputs = replace(inputs, old_logprobs=None)
    compare(scores, inputs, resolve_loss("dapo"), "dapo", epsilon_high=0.28)


@pytest.mark.parametrize("seed", SEEDS)
def test_rloo(seed):
    scores, inputs = case(seed, spread=0.1)
    loss = resolve_loss("rloo", epsilon=0.2)
    ours, grads = gradients(loss, scores, inputs, count(loss, inputs))
    theirs = trl_rloo_loss(scores, inputs, 0.2)
    torch.testing.assert_close(ours.loss, theirs, **CLOSE)
    torch.testing.assert_close(grads["logprobs"], torch.autograd.grad(theirs, scores.logprobs)[0], **CLOSE)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("threshold", [0.02, 0.2])
def test_off_policy_masking(threshold, seed):
    scores, inputs = case(seed)
    for sampler in (None, inputs.ref_logprobs):  # without the sampler's, both take the old policy's
        given = replace(inputs, sampler_logprobs=sampler)
        loss = resolve_loss("grpo", correction_off_policy_threshold=threshold)
        compare(scores, given, loss, "grpo", off_policy_mask_threshold=threshold)


MODES = {
    "tis_token": ("token_truncate", None, 1.2),
    "tis_sequence": ("sequence_truncate", 0.5, 1.2),
    "mis_token": ("token_mask", None, 1.2),
    "mis_sequence": ("sequence_mask", None, 1.5),
    "icepop": ("token_mask", 0.8, 1.3),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mode", MODES)
def test_corrections(mode, seed):
    """The weights that TRL's trainer makes, and the loss that it multiplies with them."""
    scores, inputs = case(seed)
    inputs.sampler_logprobs = (inputs.old_logprobs + 0.3 * torch.sin(5 * inputs.ref_logprobs)) * inputs.mask
    their_mode, low, high = MODES[mode]
    made = trl_experience("GRPO", [1.0, 0.0] * 3, inputs, mode=their_mode, clip_min=low, clip_max=high)
    ratio = made["importance_sampling_ratio"]
    if ratio.shape[1] > 1:  # as wide as the longest answer, or one for a whole answer
        ratio = torch.nn.functional.pad(ratio, (0, inputs.mask.shape[1] - ratio.shape[1]))
    ours = correction_weights(mode, (inputs.old_logprobs - inputs.sampler_logprobs) * inputs.mask, inputs, low, high)
    torch.testing.assert_close(ours * inputs.mask, ratio * inputs.mask, **CLOSE)
    assert (ours != 1).double().mean() > 0.1
    loss = resolve_loss("dapo", correction=mode, correction_low=low, correction_high=high)
    compare(scores, inputs, loss, "dapo", epsilon_high=0.28, importance_sampling_ratio=ratio)


REWARDS = [
    [1.0, 0.0, 0.0, 1.0, 0.5, 0.25],
    [1.0, None, 0.0, 1.0, None, 0.25],
    [0.1, 0.7, 0.3, 0.5, 0.9, 0.2],
    [None, None, 0.2, 0.4, 0.4, 0.1],
]


@pytest.mark.parametrize("rewards", REWARDS)
@pytest.mark.parametrize("num_generations", [2, 3, 6])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_grpo_advantages(scale, num_generations, rewards):
    _, inputs = case(0)
    made = trl_experience("GRPO", rewards, inputs, scale_rewards=scale, num_generations=num_generations)
    ours = GRPOAdvantage(eps=1e-4)(rewards, num_generations=num_generations, scale=scale)
    torch.testing.assert_close(ours, made["advantages"], **CLOSE)


@pytest.mark.parametrize("rewards", REWARDS)
@pytest.mark.parametrize("num_generations", [2, 3, 6])
@pytest.mark.parametrize("kl_coef", [0.0, 0.05])
def test_rloo_advantages(kl_coef, num_generations, rewards):
    """With the KL in the reward, k1 summed over the answer."""
    _, inputs = case(1)
    made = trl_experience("RLOO", rewards, inputs, beta=kl_coef, num_generations=num_generations)
    rows = [int(n) for n in inputs.mask.sum(1)]
    logps = {
        name: [row[:n].tolist() for row, n in zip(values, rows, strict=True)]
        for name, values in (("old_logps", inputs.old_logprobs), ("ref_logps", inputs.ref_logprobs))
    }
    ours = RLOOAdvantage(kl_coef=kl_coef).score(Rollouts(rewards, num_generations, **logps)).advantages
    torch.testing.assert_close(torch.tensor(ours, dtype=torch.float64), made["advantages"], **CLOSE)
