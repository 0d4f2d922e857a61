"""Muon: momentum whose update is orthogonalised (Jordan et al., "Muon: An optimizer for hidden layers in neural networks",
2024, kellerjordan.github.io/posts/muon)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

# Jordan's: singular values come near 1 (0.7 to 1.2) in five iterations instead of converging to it.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_TINY = 1e-7


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon, except that a group says in which precision (``dtype``) its matrices are orthogonalised.

    torch always does so in bfloat16. That rounds gradients, so the same rows cut into other micro-batches, or over other
    ranks, would move float32 weights by 1e-3 of themselves within a few steps.
    A group also has ``lr`` and ``weight_decay``, which decays by ``lr * weight_decay`` apart from the gradient.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], *, momentum: float, nesterov: bool, ns_steps: int) -> None:
        super().__init__(groups, {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for matrix in group["params"]:
                direction = self._with_momentum(matrix, group["momentum"], group["nesterov"])
                update = orthogonalized(direction, group["ns_steps"], group["dtype"])
                rows, columns = matrix.shape
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(update, alpha=-group["lr"] * math.sqrt(max(1.0, rows / columns)))

    def _with_momentum(self, matrix: Tensor, momentum: float, nesterov: bool) -> Tensor:
        if not momentum:
            return matrix.grad
        state = self.state[matrix]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(matrix.grad)
        average = state["momentum_buffer"].lerp_(matrix.grad, 1 - momentum)
        return matrix.grad.lerp(average, momentum) if nesterov else average


def orthogonalized(matrix: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """U V^T of ``matrix`` [m, n] = U S V^T, about: singular values come near 1. ``steps`` Newton-Schulz iterations of fifth
    order in ``dtype``, whose result it has."""
    a, b, c = COEFFICIENTS
    wide = matrix.shape[0] <= matrix.shape[1]
    x = matrix.to(dtype) if wide else matrix.to(dtype).T
    x = x / x.norm().clamp(min=_TINY)  # the largest singular value is then at most 1
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide else x.T
