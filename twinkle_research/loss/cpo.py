"""Contrastive preference optimization."""

from __future__ import annotations

from torch.nn.functional import logsigmoid

from twinkle_research.loss.preference import Pairs, PairTerms, PreferenceLoss, require_not_negative, require_positive


class CPOLoss(PreferenceLoss):
    """-log sigmoid(beta * (log p_chosen - log p_rejected)) + bc_coef * nll (Xu et al. 2024, arXiv:2401.08417, equation 3 and the
    sum with L_NLL): DPO with a uniform reference, kept near the chosen answers by their negative log-likelihood. ``nll`` is a
    mean over an answer's tokens; public implementations take it over all tokens of a micro-batch, which depends on how a step
    is cut."""

    def __init__(self, beta: float = 0.1, bc_coef: float = 1.0) -> None:
        require_positive(beta=beta)
        require_not_negative(bc_coef=bc_coef)
        self.beta = beta
        self.bc_coef = bc_coef

    def terms(self, pairs: Pairs) -> PairTerms:
        chosen, rejected = self.beta * pairs.chosen, self.beta * pairs.rejected
        nll = -pairs.chosen_mean
        return PairTerms(-logsigmoid(chosen - rejected) + self.bc_coef * nll, chosen, rejected, {"nll": nll})
