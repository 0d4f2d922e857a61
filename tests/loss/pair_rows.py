"""Random scores of pairs for the tests of preference losses."""

from dataclasses import replace

import torch

from twinkle_research.loss.base import LossInputs, TokenScores


def random_pairs(seed, pairs=5, length=9, dtype=torch.float64):
    """(scores with gradient, inputs) of ``pairs`` chosen and rejected rows in turns, each with at least one trained token."""
    generator = torch.Generator().manual_seed(seed)
    rows = 2 * pairs
    mask = (torch.rand(rows, length, generator=generator) < 0.6).to(dtype)
    mask[:, 3] = 1
    logprobs = -(2 * torch.rand(rows, length, generator=generator, dtype=dtype)) * mask
    reference = -(2 * torch.rand(rows, length, generator=generator, dtype=dtype)) * mask
    ids = torch.arange(rows)[:, None].expand(rows, length).contiguous()
    return TokenScores(logprobs.requires_grad_()), LossInputs(mask, ids, rows, ref_logprobs=reference)


def part(scores, inputs, first, last):
    """Pairs ``first`` to ``last`` of a call, as one of their own."""
    rows = slice(2 * first, 2 * last)
    tensors = {name: getattr(inputs, name) for name in ("mask", "ref_logprobs", "baselines")}
    cut = {name: None if tensor is None else tensor[rows] for name, tensor in tensors.items()}
    ids = inputs.sequence_ids[rows] - 2 * first
    return TokenScores(scores.logprobs[rows]), replace(inputs, sequence_ids=ids, num_sequences=2 * (last - first), **cut)


def packed(scores, inputs):
    """The same rows side by side in one, without the positions before the first and after the last trained one."""
    columns = [mask.nonzero().squeeze(-1) for mask in inputs.mask]
    slices = [(i, slice(int(c[0]), int(c[-1]) + 1)) for i, c in enumerate(columns)]

    def join(tensor):
        return None if tensor is None else torch.cat([tensor[i, where] for i, where in slices])[None]

    tensors = {name: join(getattr(inputs, name)) for name in ("mask", "sequence_ids", "ref_logprobs", "baselines")}
    return TokenScores(join(scores.logprobs)), replace(inputs, **tensors)
