"""Cross entropy over the trained tokens of a whole optimizer step."""

from __future__ import annotations

from torch import Tensor

from twinkle_research.errors import ConfigError
from twinkle_research.loss.base import Loss, LossInputs, LossOutput, TokenScores


class CrossEntropyLoss(Loss):
    """Negative log-likelihood of the labels, in nats.

    ``normalization="token"``: sum over trained tokens / trained tokens of the step.
    ``"sequence"``: mean over each row's trained tokens, summed over rows / rows of the step with a trained token.
    ``label_smoothing`` e: (1 - e) * nll + e * mean over the vocabulary of -logprob (Szegedy et al. 2016, arXiv:1512.00567,
    section 7; as torch.nn.CrossEntropyLoss). ``z_loss`` z: adds z * logsumexp^2 to each token, which keeps the softmax
    denominator near 1 (Chowdhery et al. 2022, PaLM, arXiv:2204.02311, section 5).
    """

    def __init__(self, normalization: str = "token", label_smoothing: float = 0.0, z_loss: float = 0.0) -> None:
        if normalization not in ("token", "sequence"):
            raise ConfigError(f"loss.normalization must be token or sequence, got {normalization!r}")
        if not 0.0 <= label_smoothing < 1.0:
            raise ConfigError(f"loss.label_smoothing must be in [0, 1), got {label_smoothing}")
        if not 0.0 <= z_loss < float("inf"):
            raise ConfigError(f"loss.z_loss must be finite and >= 0, got {z_loss}")
        self.normalization = normalization
        self.label_smoothing = label_smoothing
        self.z_loss = z_loss
        smoothing = {"mean_logprobs"} if label_smoothing else set()
        self.needs = frozenset(smoothing | ({"logsumexp"} if z_loss else set()))

    def __call__(self, scores: TokenScores, inputs: LossInputs, normalizer: float) -> LossOutput:
        nll_BT = -scores.logprobs
        per_token_BT = nll_BT
        if self.label_smoothing:
            e = self.label_smoothing
            per_token_BT = (1 - e) * per_token_BT - e * scores.mean_logprobs
        if self.z_loss:
            per_token_BT = per_token_BT + self.z_loss * scores.logsumexp.square()
        weighted_BT = per_token_BT * self._weights(inputs)
        loss = weighted_BT.sum() / max(normalizer, 1)
        metrics = {}
        if self.needs:  # the loss is then no longer the negative log-likelihood that perplexity is made of
            metrics["nll"] = ((nll_BT.detach() * inputs.mask).sum(), inputs.mask.sum())
        return LossOutput(loss, inputs.sum_by_sequence(weighted_BT.detach()), metrics)

    def logprob_gradient(self, inputs: LossInputs, normalizer: float) -> Tensor | None:
        return None if self.needs else -self._weights(inputs) / max(normalizer, 1)

    def _weights(self, inputs: LossInputs) -> Tensor:
        """[B, T]: what each token's loss counts before the division by the normaliser."""
        if self.normalization == "token":
            return inputs.mask
        tokens = inputs.sum_by_sequence(inputs.mask)
        return inputs.mask / tokens.clamp(min=1)[inputs.sequence_ids]
