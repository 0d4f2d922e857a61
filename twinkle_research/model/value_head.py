"""A critic: one value for each trained position, from the model's last hidden states."""

from __future__ import annotations

import torch
from torch import Tensor, nn

PREFIX = "value_head."  # of its parameters' names among all that is trained


class ValueHead(nn.Module):
    """A linear map of hidden states to one number, float32, that starts at 0 (so the first value is 0 everywhere).

    The value at a trained position is that of the state before its label's token. ``detach``: its gradient stops here
    and does not reach the model.
    """

    def __init__(self, hidden_size: int, device: torch.device, detach: bool = False) -> None:
        super().__init__()
        self.detach = detach
        self.linear = nn.Linear(hidden_size, 1, device=device, dtype=torch.float32)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden_ND: Tensor) -> Tensor:
        """[N, D] -> [N]"""
        hidden_ND = hidden_ND.detach() if self.detach else hidden_ND
        return self.linear(hidden_ND.to(self.linear.weight.dtype)).squeeze(-1)

    def named(self) -> dict[str, nn.Parameter]:
        return {f"{PREFIX}{name}": parameter for name, parameter in self.linear.named_parameters()}

    def describe(self) -> dict[str, int | bool]:
        return {"hidden_size": self.linear.in_features, "detach": self.detach}
