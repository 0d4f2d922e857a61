"""From logits to the distribution that is sampled: repetition penalty, temperature, top-k, top-p, the draw."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

_LIKELY = 256  # tokens among which top-p looks for its bound before it sorts the whole vocabulary
_BLOCK = 256  # tokens of which the probabilities are summed before single ones are looked at


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
        logits = logits.masked_fill(~_in_top_p(logits.softmax(dim=-1), top_p), -torch.inf)
    return logits


def _in_top_p(probs_BV: Tensor, top_p: float) -> Tensor:
    """[B, V], True for the smallest set of most likely tokens that reaches ``top_p``; of equal ones the first ids."""
    ordered = probs_BV.topk(min(_LIKELY, probs_BV.shape[-1]), dim=-1).values
    cumulative = ordered.cumsum(dim=-1)
    if not bool((cumulative[:, -1] >= top_p).all()):
        ordered = probs_BV.sort(dim=-1, descending=True).values
        cumulative = ordered.cumsum(dim=-1)
    before = pad(cumulative[:, :-1], (1, 0))  # 0 for the first: one token always stays
    kept = (before < top_p).sum(dim=-1, keepdim=True)
    least = ordered.gather(-1, kept - 1)
    above, equal = probs_BV > least, probs_BV == least
    wanted = kept - above.sum(dim=-1, keepdim=True)
    if bool((equal.sum(dim=-1, keepdim=True) > wanted).any()):
        equal &= equal.cumsum(dim=-1) <= wanted
    return above | equal | probs_BV.isnan()


def draw(logits_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """Token ids [B] by inversion: the first whose cumulative probability exceeds the uniform number in [0, 1).

    One float64 number decides a token, so a draw does not depend on the rest of the batch. Blocks of the vocabulary are
    looked at first, then the tokens of one block.
    """
    probs = logits_BV.softmax(dim=-1)
    blocks = pad(probs, (0, -probs.shape[-1] % _BLOCK)).unflatten(-1, (-1, _BLOCK))
    sums = blocks.sum(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    target = uniforms_B.to(sums).unsqueeze(-1) * sums[:, -1:]
    block = _first_above(sums, target)
    within = blocks.gather(1, block.unsqueeze(-1).expand(-1, -1, _BLOCK)).squeeze(1).cumsum(dim=-1, dtype=torch.float64)
    before = torch.where(block > 0, sums.gather(-1, (block - 1).clamp(min=0)), 0.0)
    return (block * _BLOCK + _first_above(within, target - before)).squeeze(-1)


def _first_above(cumulative_BN: Tensor, target_B1: Tensor) -> Tensor:
    """[B, 1]: the first place where the sum exceeds the target; where rounding leaves none, the last that adds anything."""
    last = (cumulative_BN < cumulative_BN[:, -1:]).sum(dim=-1, keepdim=True)
    return torch.minimum(torch.searchsorted(cumulative_BN, target_B1, right=True), last)


def kept_ids(filtered_BV: Tensor) -> list[list[int]]:
    """For each row the sorted ids whose logit (or logprob) is not -inf."""
    kept_BV = filtered_BV > -torch.inf
    ids = kept_BV.nonzero()[:, 1].tolist()
    ends = kept_BV.sum(dim=-1).cumsum(dim=-1).tolist()
    return [ids[start:end] for start, end in zip([0, *ends], ends)]
