"""Odds ratio preference optimization."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from twinkle_research.loss.preference import Pairs, PairTerms, PreferenceLoss, require_positive


class ORPOLoss(PreferenceLoss):
    """nll - lambda_orpo * log sigmoid(log odds_chosen - log odds_rejected) (Hong et al. 2024, arXiv:2403.07691, equations 2, 4,
    6 and 7). An answer's probability p is the geometric mean over its tokens, odds = p / (1 - p), nll = -log p_chosen."""

    def __init__(self, lambda_orpo: float = 0.1) -> None:
        require_positive(lambda_orpo=lambda_orpo)
        self.lambda_orpo = lambda_orpo

    def terms(self, pairs: Pairs) -> PairTerms:
        chosen, rejected = pairs.chosen_mean, pairs.rejected_mean
        log_odds = (chosen - rejected) - (log_one_minus_exp(chosen) - log_one_minus_exp(rejected))
        loss = -chosen - self.lambda_orpo * logsigmoid(log_odds)
        metrics = {"nll": -chosen, "log_odds": log_odds}
        return PairTerms(loss, self.lambda_orpo * chosen, self.lambda_orpo * rejected, metrics)


def log_one_minus_exp(x: Tensor) -> Tensor:
    """log(1 - e^x) for x < 0 without loss of digits (Maechler 2012, "Accurately computing log(1 - exp(-|a|))"). An x that was
    rounded to 0 counts as the largest number below it."""
    x = x.clamp(max=-torch.finfo(x.dtype).eps)
    return torch.where(x > -math.log(2), torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(x)))
