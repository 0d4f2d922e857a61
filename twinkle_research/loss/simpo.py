"""Simple preference optimization."""

from __future__ import annotations

from torch.nn.functional import logsigmoid

from twinkle_research.loss.preference import Pairs, PairTerms, PreferenceLoss, require_not_negative, require_positive


class SimPOLoss(PreferenceLoss):
    """-log sigmoid(beta * (m_chosen - m_rejected) - gamma), where m is an answer's mean log-probability a token (Meng et al.
    2024, arXiv:2405.14734, equation 6). No reference. ``gamma`` is the margin itself, not its ratio to beta."""

    def __init__(self, beta: float = 2.5, gamma: float = 0.5) -> None:
        require_positive(beta=beta)
        require_not_negative(gamma=gamma)
        self.beta = beta
        self.gamma = gamma

    def terms(self, pairs: Pairs) -> PairTerms:
        chosen, rejected = self.beta * pairs.chosen_mean, self.beta * pairs.rejected_mean
        return PairTerms(-logsigmoid(chosen - rejected - self.gamma), chosen, rejected, {})
