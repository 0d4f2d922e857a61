"""Kahneman-Tversky optimization on pairs."""

from __future__ import annotations

import torch

from twinkle_research.loss.preference import Pairs, PairTerms, PreferenceLoss, require_positive


class KTOPairLoss(PreferenceLoss):
    """With r an answer's log-ratio of policy to reference (summed over its tokens), for each pair the mean of
    1 - sigmoid(beta * (r_chosen - z_rejected)) and 1 - sigmoid(beta * (z_chosen - r_rejected)) (Ethayarajh et al. 2024,
    arXiv:2402.01306, equation 7, both weights 1, for data where every prompt has one good and one bad answer).

    The reference point z stands for the divergence of policy from reference, and has no gradient. It is max(0, mean r) over
    the answers of the other kind in the whole optimizer step: ``baselines``, a number for each row. Without them z = 0, its
    value as long as policy and reference are the same.
    """

    needs_reference = True
    needs_baselines = True

    def __init__(self, beta: float = 0.1) -> None:
        require_positive(beta=beta)
        self.beta = beta

    def terms(self, pairs: Pairs) -> PairTerms:
        chosen, rejected = pairs.chosen_ratio, pairs.rejected_ratio
        above, below = chosen, rejected
        if pairs.chosen_baseline is not None:
            above, below = chosen - pairs.chosen_baseline, rejected - pairs.rejected_baseline
        # 1 - sigmoid(x) = sigmoid(-x)
        loss = (torch.sigmoid(-self.beta * above) + torch.sigmoid(self.beta * below)) / 2
        return PairTerms(loss, self.beta * chosen, self.beta * rejected, {})
