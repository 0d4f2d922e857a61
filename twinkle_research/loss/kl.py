"""Estimates of KL(policy || reference) from the log-probabilities of sampled tokens.

With d = log reference - log policy, for tokens drawn from the policy (Schulman 2020, "Approximating KL Divergence"):

    k1 = -d              unbiased value, high variance, may be negative; as a loss its gradient is 0 in expectation
    k2 = d^2 / 2         biased value; its gradient is, in expectation, that of the KL
    k3 = e^d - 1 - d     unbiased value, never negative; its gradient is that of KL(reference || policy) in expectation

The names with ``_plus`` are straight-through forms: the value of the first estimator with the gradient of k2, which is -d.
"""

from __future__ import annotations

import torch
from torch import Tensor

ESTIMATORS = ("k1", "k2", "k3", "k1_plus", "k3_plus")


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: str = "k3", clamp: float | None = None) -> Tensor:
    """Per token, in nats, of the shape of ``logprobs``, with gradient. ``clamp`` bounds d before k3 exponentiates it."""
    d = ref_logprobs - logprobs
    if estimator.endswith("_plus"):
        k2 = d.square() / 2
        return k2 - k2.detach() + _value(d.detach(), estimator.removesuffix("_plus"), clamp)
    return _value(d, estimator, clamp)


def _value(d: Tensor, estimator: str, clamp: float | None) -> Tensor:
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return d.square() / 2
    if estimator == "k3":
        d = d if clamp is None else d.clamp(-clamp, clamp)
        # Where the two policies are close e^d - 1 loses all digits, in the value and in the derivative; expm1 does not.
        slope = torch.expm1(d.detach())
        return slope - d.detach() + slope * (d - d.detach())
    raise ValueError(f"unknown KL estimator {estimator!r}; valid: {', '.join(ESTIMATORS)}")
