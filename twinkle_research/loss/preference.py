"""What the losses on pairs of answers have in common: which rows are a pair, sums over answers, the report.

Rows come in turns, chosen, rejected, chosen, rejected, ... (Twinkle's order); the labels of each are its answer alone.
The normaliser is the number of pairs of the whole optimizer step. P counts the pairs of a call.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from twinkle_research.data_format import IGNORE_INDEX, InputFeature
from twinkle_research.errors import ConfigError, DataError, UserError
from twinkle_research.loss.base import Loss, LossInputs, LossOutput, TokenScores


@dataclass
class Pairs:
    """Both answers of each pair; a term of a loss is made of these."""

    chosen: Tensor  # [P] log-probability of the answer: the sum over its tokens
    rejected: Tensor  # [P]
    chosen_tokens: Tensor  # [P] trained tokens of the answer, at least 1
    rejected_tokens: Tensor  # [P]
    chosen_ratio: Tensor | None  # [P] log of policy over reference for the answer; None without reference
    rejected_ratio: Tensor | None  # [P]
    chosen_baseline: Tensor | None  # [P] what the log-ratio is compared with; None where none was given
    rejected_baseline: Tensor | None  # [P]

    @property
    def chosen_mean(self) -> Tensor:
        """[P] mean log-probability of a token of the answer."""
        return self.chosen / self.chosen_tokens

    @property
    def rejected_mean(self) -> Tensor:
        return self.rejected / self.rejected_tokens


@dataclass
class PairTerms:
    """What a loss makes of pairs. ``rewards``: what its margin is the difference of, for the report only."""

    loss: Tensor  # [P] with gradient
    chosen_rewards: Tensor  # [P]
    rejected_rewards: Tensor  # [P]
    metrics: Mapping[str, Tensor]  # name -> [P], reported as means over pairs


class PreferenceLoss(Loss):
    """Base of the losses on pairs. ``needs_reference``: whether ``ref_logps`` must be given. ``needs_baselines``: whether it
    wants ``baselines``, which the training loop then measures (KTO)."""

    rows_together: ClassVar[int] = 2
    normalization: str = "pair"
    needs_reference: bool = False
    needs_baselines: ClassVar[bool] = False

    def count(self, features: Sequence[InputFeature]) -> int:
        """Pairs with trained tokens. Raises DataError where only one answer of a pair has any."""
        if len(features) % 2:
            raise UserError(f"{type(self).__name__} takes pairs, chosen before rejected, but got {len(features)} rows")
        trained = [any(label != IGNORE_INDEX for label in f["labels"]) for f in features]
        pairs = list(zip(trained[::2], trained[1::2], strict=True))
        for i, (chosen, rejected) in enumerate(pairs):
            if chosen != rejected:
                name = features[2 * i].get("row") or f"pair {i}"
                raise DataError(f"{name}: the {'rejected' if chosen else 'chosen'} answer has no trained token")
        return sum(chosen for chosen, _ in pairs)

    @property
    def reads(self) -> frozenset[str]:
        found = {"ref_logps"} if self.needs_reference else set()
        return frozenset(found | ({"baselines"} if self.needs_baselines else set()))

    @abstractmethod
    def terms(self, pairs: Pairs) -> PairTerms: ...

    def __call__(self, scores: TokenScores, inputs: LossInputs, normalizer: float) -> LossOutput:
        """``sequence_losses``: that of a pair stands at its chosen row and at its rejected row."""
        if inputs.num_sequences % 2:
            raise UserError(f"{type(self).__name__} takes pairs, chosen before rejected, but got {inputs.num_sequences} rows")
        tokens = inputs.sum_by_sequence(inputs.mask)
        there = (tokens[::2] + tokens[1::2] > 0).to(scores.logprobs.dtype)
        terms = self.terms(self._pairs(scores, inputs, tokens))
        loss_P = terms.loss * there
        with torch.no_grad():
            chosen, rejected = terms.chosen_rewards.detach(), terms.rejected_rewards.detach()
            means = {
                "rewards/chosen": chosen,
                "rewards/rejected": rejected,
                "rewards/margins": chosen - rejected,
                "rewards/accuracies": (chosen > rejected).to(chosen.dtype),
                **{name: values.detach() for name, values in terms.metrics.items()},
            }
            logps = inputs.sum_by_sequence(scores.logprobs.detach())
            means |= {"logps/chosen": logps[::2], "logps/rejected": logps[1::2]}
            metrics = {name: ((values * there).sum(), there.sum()) for name, values in means.items()}
        return LossOutput(loss_P.sum() / max(normalizer, 1), loss_P.detach().repeat_interleave(2), metrics)

    def _pairs(self, scores: TokenScores, inputs: LossInputs, tokens: Tensor) -> Pairs:
        logps, ratios, baselines = inputs.sum_by_sequence(scores.logprobs), None, None
        if self.needs_reference:
            if inputs.ref_logprobs is None:
                raise UserError(f"{type(self).__name__} compares with a reference: pass ref_logps (model.reference_logps)")
            # Token by token, where the two are close: the difference of two large sums would lose digits.
            ratios = inputs.sum_by_sequence(scores.logprobs - inputs.ref_logprobs)
        tokens = tokens.clamp(min=1)
        if self.needs_baselines and inputs.baselines is not None:
            baselines = inputs.sum_by_sequence(inputs.baselines) / tokens
        two = [x for v in (logps, tokens, ratios, baselines) for x in ((None, None) if v is None else (v[::2], v[1::2]))]
        return Pairs(*two)


def require_positive(**values: float) -> None:
    """Raises ConfigError where an option that would switch the loss off is not a number above 0."""
    for name, value in values.items():
        if not 0 < value < float("inf"):
            raise ConfigError(f"loss.{name} must be finite and > 0, got {value}")


def require_not_negative(**values: float) -> None:
    for name, value in values.items():
        if not 0 <= value < float("inf"):
            raise ConfigError(f"loss.{name} must be finite and >= 0, got {value}")
