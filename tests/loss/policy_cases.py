"""Random and hand-made batches for the losses on sampled answers, float64, B rows of at most T tokens."""

from dataclasses import fields, replace

import torch
from torch import Tensor

from twinkle_research.loss import resolve_loss
from twinkle_research.loss.base import Loss, LossInputs, LossOutput, TokenScores

# Each loss with options that turn on what it has; all have values far from where two branches meet.
LOSSES = {
    "grpo": {},
    "grpo, all options": {"epsilon_high": 0.3, "beta": 0.1, "entropy_coef": 0.02, "dual_clip": 2.0, "correction": "tis_token"},
    "dapo": {},
    "bnpo": {"beta": 0.1, "kl_estimator": "k2"},
    "dr_grpo": {"max_completion_length": 16, "beta": 0.1, "kl_estimator": "k1_plus"},
    "gspo": {},
    "gspo, sequence weights": {"epsilon": 0.1, "epsilon_high": 0.1, "correction": "mis_sequence", "correction_low": 0.3},
    "cispo": {},
    "cispo, absolute": {"clip": "absolute", "epsilon": 0.9, "epsilon_high": 1.1, "correction": "icepop"},
    "sapo": {},
    "ppo": {"normalization": "sequence", "beta": 0.1, "kl_estimator": "k3_plus"},
    "ppo, critic": {"value_coef": 0.5, "dual_clip": 3.0},
    "ppo_value": {},
    "importance_sampling": {"correction": "tis_sequence"},
    "reinforce": {"correction_off_policy_threshold": 0.05},
    "reinforce, clipped": {"epsilon": 0.2, "normalization": "sequence_sum"},
    "rloo": {},
    "rloo, clipped": {"epsilon": 0.2},
}


def loss_of(name: str) -> Loss:
    return resolve_loss(name.partition(",")[0], **LOSSES[name])


def random_case(
    seed: int, rows: int = 5, length: int = 7, spread: float = 0.3, by_token: bool = False
) -> tuple[TokenScores, LossInputs]:
    """Answers of 0 to ``length`` tokens, the first one never empty. ``spread``: how far the policies are apart, in nats.
    ``by_token``: advantages differ from token to token."""
    generator = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(rows, length, generator=generator, dtype=torch.float64)

    lengths = torch.randint(0, length + 1, (rows,), generator=generator)
    lengths[0] = max(int(lengths[0]), 1)
    mask = (torch.arange(length) < lengths[:, None]).double()
    logprobs = (-normal().abs() - 0.5) * mask
    advantages = normal() if by_token else normal()[:, :1].expand(rows, length)
    scores = TokenScores(
        logprobs=logprobs.requires_grad_(),
        entropy=(normal().abs() * mask).requires_grad_(),
        values=(normal() * mask).requires_grad_(),
    )
    inputs = LossInputs(
        mask=mask,
        sequence_ids=torch.arange(rows)[:, None].expand(rows, length).contiguous(),
        num_sequences=rows,
        advantages=advantages * mask,
        old_logprobs=(logprobs.detach() + spread * normal()) * mask,
        ref_logprobs=(logprobs.detach() + spread * normal()) * mask,
        sampler_logprobs=(logprobs.detach() + spread * normal()) * mask,
        old_values=(scores.values.detach() + spread * normal()) * mask,
        returns=normal() * mask,
    )
    return scores, inputs


def flat_case(
    logprobs: list[list[float]], advantages: list[float], **inputs: list[list[float]]
) -> tuple[TokenScores, LossInputs]:
    """Ragged rows of numbers: an advantage a row, all tokens trained."""
    length = max(map(len, logprobs))

    def pad(rows: list[list[float]]) -> Tensor:
        return torch.tensor([row + [0.0] * (length - len(row)) for row in rows], dtype=torch.float64)

    mask = pad([[1.0] * len(row) for row in logprobs])
    sequence_ids = torch.arange(len(logprobs))[:, None].expand(mask.shape).contiguous()
    spread = torch.tensor(advantages, dtype=torch.float64)[:, None] * mask
    given = {name: pad(rows) for name, rows in inputs.items()}
    return TokenScores(pad(logprobs).requires_grad_()), LossInputs(mask, sequence_ids, len(logprobs), spread, **given)


def count(loss: Loss, inputs: LossInputs) -> int:
    return loss.count([{"labels": [1 if m else -100 for m in row]} for row in inputs.mask.tolist()])


def changed(scores: TokenScores, inputs: LossInputs, change) -> tuple[TokenScores, LossInputs]:
    """``change`` applied to each [B, T] tensor; the changed scores are leaves of their own."""
    new_scores = TokenScores(
        **{
            f.name: None if (old := getattr(scores, f.name)) is None else change(old.detach()).requires_grad_()
            for f in fields(scores)
        }
    )
    tensors = {f.name: change(getattr(inputs, f.name)) for f in fields(inputs) if isinstance(getattr(inputs, f.name), Tensor)}
    return new_scores, replace(inputs, **tensors)


def gradients(loss: Loss, scores: TokenScores, inputs: LossInputs, normalizer: float) -> tuple[LossOutput, dict[str, Tensor]]:
    """The loss, and its derivatives by all scores; zeros where it does not depend on one."""
    out = loss(scores, inputs, normalizer)
    leaves = {f.name: getattr(scores, f.name) for f in fields(scores) if getattr(scores, f.name) is not None}
    found = torch.autograd.grad(out.loss, list(leaves.values()), allow_unused=True)
    return out, {name: torch.zeros_like(leaf) if g is None else g for (name, leaf), g in zip(leaves.items(), found, strict=True)}
