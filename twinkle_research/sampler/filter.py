"""From logits to the distribution that is sampled: repetition penalty, temperature, top-k, top-p, the draw."""

from __future__ import annotations

import torch
from torch import Tensor


def penalise_repetition(logits_BV: Tensor, seen_BV: Tensor, penalty: float) -> Tensor:
    """Divides positive and multiplies negative logits of tokens seen before (Keskar et al. 2019, arXiv:1909.05858)."""
    penalised = torch.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)
    return torch.where(seen_BV, penalised, logits_BV)


def filter_logits(logits_BV: Tensor, temperature: float = 1.0, top_k: int = -1, top_p: float = 1.0) -> Tensor:
    """float32 logits of the distribution sampled from; -inf outside the kept set.

    The order is temperature, then top-k, then top-p over what top-k left. Top-k keeps ties with the k-th largest;
    top-p keeps the smallest set of most likely tokens whose probability reaches ``top_p``. At temperature 0 (greedy)
    the logits stay as they are.
    """
    logits = logits_BV.float()
    if temperature == 0:
        return logits
    if temperature != 1:
        logits = logits / temperature
    if 1 <= top_k < logits.shape[-1]:
        smallest_kept = logits.topk(top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < smallest_kept, -torch.inf)
    if top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        probs = ordered.softmax(dim=-1)
        before = probs.cumsum(dim=-1) - probs  # 0 for the first: one token always stays
        drop = torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before >= top_p)
        logits = logits.masked_fill(drop, -torch.inf)
    return logits


def draw(logits_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """Token ids [B] by inversion: the first whose cumulative probability exceeds the uniform number in [0, 1).

    One float64 number decides a token, so a draw does not depend on the rest of the batch.
    """
    cumulative = logits_BV.softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    target = uniforms_B.to(cumulative).unsqueeze(-1) * cumulative[..., -1:]
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1).clamp_(max=logits_BV.shape[-1] - 1)


def kept_ids(filtered_BV: Tensor) -> list[list[int]]:
    """For each row the sorted ids whose logit (or logprob) is not -inf."""
    kept_BV = filtered_BV > -torch.inf
    ids = kept_BV.nonzero()[:, 1].tolist()
    ends = kept_BV.sum(dim=-1).cumsum(dim=-1).tolist()
    return [ids[start:end] for start, end in zip([0, *ends], ends)]
