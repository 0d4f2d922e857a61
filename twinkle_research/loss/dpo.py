"""Direct preference optimization and its relatives with a reference."""

from __future__ import annotations

import torch
from torch.nn.functional import logsigmoid

from twinkle_research.errors import ConfigError, nearest
from twinkle_research.loss.preference import Pairs, PairTerms, PreferenceLoss, require_not_negative, require_positive

LOSS_TYPES = ("sigmoid", "hinge", "ipo")


class DPOLoss(PreferenceLoss):
    """With h the difference between the log-ratios (policy over reference, summed over an answer) of chosen and rejected:

    ``sigmoid``: -log sigmoid(beta * h) (Rafailov et al. 2023, arXiv:2305.18290, equation 7); with ``label_smoothing`` e the
    conservative form -(1 - e) log sigmoid(beta * h) - e log sigmoid(-beta * h), for labels that are wrong with probability e.
    ``hinge``: max(0, 1 - beta * h) (Zhao et al. 2023, SLiC-HF, arXiv:2305.10425; on log-ratios: Liu et al. 2023, RSO,
    arXiv:2309.06657).
    ``ipo``: (h - 1 / (2 beta))^2 (Azar et al. 2023, arXiv:2310.12036, equation 17, where beta is called tau): beta does not
    multiply h. ``average_logps``: h of means over each answer's tokens instead of sums, which makes beta mean the same for
    answers of any length (TRL's form).

    ``sft_weight`` w adds w times the negative log-likelihood of the chosen answer, a mean over its tokens (Pang et al. 2024,
    arXiv:2404.19733, equation 1). ``reference_free``: the reference gives every answer the same probability.
    """

    def __init__(
        self,
        beta: float = 0.1,
        label_smoothing: float = 0.0,
        loss_type: str = "sigmoid",
        reference_free: bool = False,
        sft_weight: float = 0.0,
        average_logps: bool = False,
    ) -> None:
        require_positive(beta=beta)
        require_not_negative(sft_weight=sft_weight)
        if loss_type == "kto_pair":
            raise ConfigError("loss_type='kto_pair' is a loss of its own: loss=kto_pair (KTOPairLoss)")
        if loss_type not in LOSS_TYPES:
            raise ConfigError(f"loss.loss_type={loss_type!r}; {nearest(loss_type, LOSS_TYPES)}")
        if not 0 <= label_smoothing < 0.5:
            raise ConfigError(f"loss.label_smoothing must be in [0, 0.5), got {label_smoothing}")
        if label_smoothing and loss_type != "sigmoid":
            raise ConfigError(f"loss.label_smoothing is defined for loss_type=sigmoid only, not for {loss_type}")
        if average_logps and loss_type != "ipo":
            raise ConfigError(f"loss.average_logps has no effect with loss_type={loss_type}: it belongs to ipo")
        self.beta = beta
        self.label_smoothing = label_smoothing
        self.loss_type = loss_type
        self.sft_weight = sft_weight
        self.average_logps = average_logps
        self.needs_reference = not reference_free

    def terms(self, pairs: Pairs) -> PairTerms:
        chosen = pairs.chosen if pairs.chosen_ratio is None else pairs.chosen_ratio
        rejected = pairs.rejected if pairs.rejected_ratio is None else pairs.rejected_ratio
        h = chosen - rejected
        if self.loss_type == "sigmoid":
            loss = -(1 - self.label_smoothing) * logsigmoid(self.beta * h)
            if self.label_smoothing:
                loss = loss - self.label_smoothing * logsigmoid(-self.beta * h)
        elif self.loss_type == "hinge":
            loss = torch.relu(1 - self.beta * h)
        else:
            if self.average_logps:
                h = chosen / pairs.chosen_tokens - rejected / pairs.rejected_tokens
            loss = (h - 1 / (2 * self.beta)).square()
        metrics = {}
        if self.sft_weight:
            metrics["nll"] = -pairs.chosen_mean
            loss = loss + self.sft_weight * metrics["nll"]
        return PairTerms(loss, self.beta * chosen, self.beta * rejected, metrics)
