"""Base of the losses on sampled answers: everything but the objective itself."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from twinkle_research.errors import ConfigError, UserError, nearest
from twinkle_research.loss.base import Loss, LossInputs, LossOutput, TokenScores
from twinkle_research.loss.config import CORRECTION_BOUNDS
from twinkle_research.loss.correction import correction_weights, off_policy_mask
from twinkle_research.loss.kl import ESTIMATORS, kl_estimate
from twinkle_research.loss.policy import Objective, clamped, log_ratio, token_weights

NORMALIZATIONS = ("token", "sequence", "sequence_sum")


class PolicyLoss(Loss):
    """objective(ratio, advantage) * correction + beta * KL(policy || reference) - entropy_coef * entropy, of each trained
    token, summed with the weights of ``normalization`` (see policy.token_weights) and divided by the step's normaliser.

    ``kl_estimator``: see kl.py. ``log_ratio_clamp``: the log-ratio is held within +-this before it is exponentiated; None: not.
    ``correction`` with ``correction_low`` and ``correction_high`` (None: the mode's own): see correction.py.
    ``correction_off_policy_threshold``: see correction.off_policy_mask.

    The entropy bonus and the KL have the weights of the objective; TRL's entropy bonus is always a mean over tokens.

    ``old_logprobs`` None means that the policy has not changed since the rows were drawn: the ratio is 1, with gradient.
    Raises UserError where a loss that is to be trained lacks an input. Without gradient (scoring) it counts without.
    """

    uses_ratio = True
    # Whatever the options: the last three are at least reported.
    reads: ClassVar[frozenset[str]] = frozenset({"advantages", "old_logps", "ref_logps", "sampler_logps"})

    def __init__(
        self,
        beta: float = 0.0,
        entropy_coef: float = 0.0,
        kl_estimator: str = "k3",
        log_ratio_clamp: float | None = 20.0,
        normalization: str = "token",
        correction: str = "none",
        correction_low: float | None = None,
        correction_high: float | None = None,
        correction_off_policy_threshold: float | None = None,
    ) -> None:
        one_of(kl_estimator=(kl_estimator, ESTIMATORS), correction=(correction, CORRECTION_BOUNDS))
        one_of(normalization=(normalization, NORMALIZATIONS))
        not_negative(beta=beta, entropy_coef=entropy_coef, correction_off_policy_threshold=correction_off_policy_threshold)
        positive(log_ratio_clamp=log_ratio_clamp, correction_low=correction_low, correction_high=correction_high)
        low, high = CORRECTION_BOUNDS[correction]
        low, high = low if correction_low is None else correction_low, high if correction_high is None else correction_high
        if low is not None and high is not None and low >= high:
            raise ConfigError(f"loss.correction_low={low} must be below loss.correction_high={high}")
        self.beta = beta
        self.entropy_coef = entropy_coef
        self.kl_estimator = kl_estimator
        self.log_ratio_clamp = log_ratio_clamp
        self.normalization = normalization
        self.correction = correction
        self.correction_low, self.correction_high = low, high
        self.off_policy_threshold = correction_off_policy_threshold
        self.needs = frozenset({"entropy"} if entropy_coef else ())

    @abstractmethod
    def objective(self, logprobs_BT: Tensor, log_ratio_BT: Tensor, inputs: LossInputs) -> Objective:
        """Loss of each token before correction, KL and entropy. ``inputs`` has advantages; all is 0 where not trained."""

    def log_ratio(self, logprobs_BT: Tensor, inputs: LossInputs) -> Tensor:
        return clamped(log_ratio(logprobs_BT, inputs.old_logprobs), self.log_ratio_clamp)

    def auxiliary(self, scores: TokenScores, inputs: LossInputs) -> tuple[Tensor | None, dict[str, Tensor]]:
        """[B, T] what else is to be made small (a critic's loss), and what to report of it."""
        return None, {}

    def __call__(self, scores: TokenScores, inputs: LossInputs, normalizer: float) -> LossOutput:
        inputs = self._complete(inputs, training=scores.logprobs.requires_grad)
        logprobs_BT = where_trained(scores.logprobs, inputs)
        log_ratio_BT = self.log_ratio(logprobs_BT, inputs)
        found = self.objective(logprobs_BT, log_ratio_BT, inputs)
        correction_BT = self._correction(logprobs_BT, inputs)
        per_token_BT = found.loss_BT if correction_BT is None else found.loss_BT * correction_BT
        auxiliary_BT, report = self.auxiliary(scores, inputs)
        report |= _ratio_report(log_ratio_BT.detach(), found) | _gap_report(logprobs_BT.detach(), inputs, correction_BT)
        if inputs.ref_logprobs is not None:
            report["kl/mean"] = kl_estimate(logprobs_BT, inputs.ref_logprobs, self.kl_estimator, self.log_ratio_clamp)
            per_token_BT = per_token_BT + self.beta * report["kl/mean"]
        if scores.entropy is not None:
            report["entropy"] = where_trained(scores.entropy, inputs)
            per_token_BT = per_token_BT - self.entropy_coef * report["entropy"]
        if auxiliary_BT is not None:
            per_token_BT = per_token_BT + auxiliary_BT
        weighted_BT = per_token_BT * token_weights(self.normalization, inputs)
        largest = {"ratio/max": "ratio/mean", "sampler_gap/max": "sampler_gap/mean_abs"}
        maxima = {name: (report[of] * inputs.mask).amax() for name, of in largest.items() if of in report}
        loss = weighted_BT.sum() / max(normalizer, 1)
        return LossOutput(loss, inputs.sum_by_sequence(weighted_BT.detach()), sums_of(report, inputs), maxima)

    def logprob_gradient(self, inputs: LossInputs, normalizer: float) -> Tensor | None:
        if self.beta or self.entropy_coef or self.correction != "none" or self.off_policy_threshold is not None:
            return None
        if inputs.advantages is None or (self.uses_ratio and inputs.old_logprobs is not None):
            return None
        return self.slope(inputs) / max(normalizer, 1)

    def slope(self, inputs: LossInputs) -> Tensor:
        """[B, T] derivative of the summed loss by the log-probabilities at ratio 1, where all objectives of this package have
        that of the policy gradient."""
        return -inputs.advantages * token_weights(self.normalization, inputs)

    def _complete(self, inputs: LossInputs, training: bool) -> LossInputs:
        """Checks that what this loss reads is there, and sets what is not trained to 0, whatever stood there."""
        wanted = {"advantages": True, "ref_logps": self.beta > 0, "sampler_logps": self.correction != "none"}
        given = {
            "advantages": inputs.advantages, "ref_logps": inputs.ref_logprobs, "sampler_logps": inputs.sampler_logprobs,
        }  # fmt: skip
        if training:
            missing = [name for name, needed in wanted.items() if needed and given[name] is None]
            if missing:
                raise UserError(f"{type(self).__name__} needs {' and '.join(missing)}: pass them to forward_backward")
        if inputs.advantages is None:
            inputs = replace(inputs, advantages=torch.zeros_like(inputs.mask))
        names = ("advantages", "old_logprobs", "ref_logprobs", "sampler_logprobs", "old_values", "returns")
        return replace(inputs, **{name: where_trained(getattr(inputs, name), inputs) for name in names})

    def _correction(self, logprobs_BT: Tensor, inputs: LossInputs) -> Tensor | None:
        """[B, T] what the objective is multiplied by, without gradient; None: by nothing."""
        old_BT = logprobs_BT.detach() if inputs.old_logprobs is None else inputs.old_logprobs
        sampler_BT = old_BT if inputs.sampler_logprobs is None else inputs.sampler_logprobs
        weights_BT = None
        if self.correction != "none":
            weights_BT = correction_weights(
                self.correction, old_BT - sampler_BT, inputs, self.correction_low, self.correction_high
            )
        if self.off_policy_threshold is not None:
            keep_BT = off_policy_mask(logprobs_BT, sampler_BT, inputs.advantages, inputs, self.off_policy_threshold)
            weights_BT = keep_BT if weights_BT is None else weights_BT * keep_BT
        return weights_BT


def where_trained(values_BT: Tensor | None, inputs: LossInputs) -> Tensor | None:
    """Chosen, not multiplied: 0 times an infinity that stood at padding would be NaN, in the value or in the gradient."""
    return None if values_BT is None else torch.where(inputs.mask > 0, values_BT, 0.0)


def sums_of(report: dict[str, Tensor], inputs: LossInputs) -> dict[str, tuple[Tensor, Tensor]]:
    """Name -> (sum over trained tokens, their number)."""
    tokens = inputs.mask.sum()
    return {name: ((values_BT.detach() * inputs.mask).sum(), tokens) for name, values_BT in report.items()}


def _ratio_report(log_ratio_BT: Tensor, found: Objective) -> dict[str, Tensor]:
    report = {"ratio/mean": log_ratio_BT.exp(), "kl/old": torch.expm1(log_ratio_BT) - log_ratio_BT}
    for name, clipped_BT in (("low", found.clipped_low_BT), ("high", found.clipped_high_BT)):
        if clipped_BT is not None:
            report[f"ratio/clip_{name}"] = clipped_BT.to(log_ratio_BT.dtype)
    return report


def _gap_report(logprobs_BT: Tensor, inputs: LossInputs, correction_BT: Tensor | None) -> dict[str, Tensor]:
    report = {}
    if inputs.sampler_logprobs is not None:
        trainer_BT = logprobs_BT if inputs.old_logprobs is None else inputs.old_logprobs
        report["sampler_gap/mean_abs"] = (trainer_BT - inputs.sampler_logprobs).abs()
    if correction_BT is not None:
        report["correction/mean"] = correction_BT
        report["correction/dropped"] = (correction_BT == 0).to(correction_BT.dtype)
    return report


# --- options ----------------------------------------------------------------------------------------------------------


def one_of(**options: tuple[str, Sequence[str]]) -> None:
    for name, (value, valid) in options.items():
        if value not in valid:
            raise ConfigError(f"loss.{name}={value!r}; {nearest(value, valid)}")


def not_negative(**options: float | None) -> None:
    """Raises ConfigError where an option that is given is negative or not finite."""
    for name, value in options.items():
        if value is not None and not 0 <= value < math.inf:
            raise ConfigError(f"loss.{name} must be finite and >= 0, got {value}")


def positive(**options: float | None) -> None:
    for name, value in options.items():
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"loss.{name} must be finite and > 0, got {value}")
