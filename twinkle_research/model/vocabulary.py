"""Where the rows of the output projection lie in the vocabulary: all of it here, or shards of it on several ranks.

What ``head.py`` asks about the vocabulary as a whole goes through here. C positions of a chunk, V rows held here.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


class Vocabulary:
    """The rows of the projection are the vocabulary: every sum is complete, every label is here."""

    is_whole = True

    def total(self, weight_VD: Tensor) -> int:
        """The number of tokens."""
        return len(weight_VD)

    def largest(self, z_CV: Tensor) -> Tensor:
        """[C, 1]."""
        return z_CV.amax(-1, keepdim=True)

    def complete(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        """From sums over the tokens held here, [C] each, to those over the vocabulary."""
        return sums

    def mean(self, x: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
        """This shard's part of a mean over the tokens, which lie along ``dim``."""
        return x.mean(dim, dtype=dtype)

    def at_labels(self, x_CV: Tensor, labels_C: Tensor) -> Tensor:
        """[C], 0 where the label is held elsewhere."""
        return x_CV.gather(-1, labels_C[:, None]).squeeze(-1)

    def add_at_labels(self, x_CV: Tensor, labels_C: Tensor, values_C: Tensor) -> None:
        x_CV.scatter_add_(-1, labels_C[:, None], values_C[:, None])

    def rows_at_labels(self, weight_VD: Tensor, labels_C: Tensor) -> Tensor:
        """[C, D], 0 where the label is held elsewhere."""
        return weight_VD[labels_C]

    def keep(self, dropped_CV: Tensor, rows_K: Tensor, ids_K: Tensor) -> None:
        """Sets False at the given tokens."""
        dropped_CV[rows_K, ids_K] = False


class ShardedVocabulary(Vocabulary):
    """The rows are the tokens ``start`` to ``start + V - 1`` of ``total``; V may be 0, and differ between ranks.

    ``group``: the ranks (None: all) that hold the vocabulary together, each token once and no padding. All of them score the
    same positions. Two all-reduces a chunk of positions, whatever a rank holds, and none in the backward pass.
    """

    is_whole = False

    def __init__(self, start: int, total: int, group: dist.ProcessGroup | None = None):
        self.start, self._total, self.group = start, total, group

    def total(self, weight_VD: Tensor) -> int:
        if len(weight_VD) > max(self._total - self.start, 0):
            raise ValueError(
                f"rows {self.start} to {self.start + len(weight_VD) - 1} of a vocabulary of {self._total}: cut the padding off"
            )
        return self._total

    def largest(self, z_CV: Tensor) -> Tensor:
        largest = z_CV.amax(-1, keepdim=True) if z_CV.shape[1] else z_CV.new_full((len(z_CV), 1), -torch.inf)
        dist.all_reduce(largest, dist.ReduceOp.MAX, self.group)
        return largest

    def complete(self, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        stacked = torch.stack(list(sums.values()))
        dist.all_reduce(stacked, dist.ReduceOp.SUM, self.group)
        return dict(zip(sums, stacked, strict=True))

    def mean(self, x: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
        return x.sum(dim, dtype=dtype) / self._total

    def _held(self, ids: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Which of the ids are here, and the row of each (some row for the others)."""
        local = ids - self.start
        return (local >= 0) & (local < rows), local.clamp(0, rows - 1)

    def at_labels(self, x_CV: Tensor, labels_C: Tensor) -> Tensor:
        if not x_CV.shape[1]:
            return x_CV.new_zeros(len(x_CV))
        here_C, rows_C = self._held(labels_C, x_CV.shape[1])
        return super().at_labels(x_CV, rows_C).masked_fill(~here_C, 0.0)

    def add_at_labels(self, x_CV: Tensor, labels_C: Tensor, values_C: Tensor) -> None:
        if x_CV.shape[1]:
            here_C, rows_C = self._held(labels_C, x_CV.shape[1])
            super().add_at_labels(x_CV, rows_C, values_C.masked_fill(~here_C, 0.0))

    def rows_at_labels(self, weight_VD: Tensor, labels_C: Tensor) -> Tensor:
        if not len(weight_VD):
            return weight_VD.new_zeros(len(labels_C), weight_VD.shape[1])
        here_C, rows_C = self._held(labels_C, len(weight_VD))
        return super().rows_at_labels(weight_VD, rows_C).masked_fill(~here_C[:, None], 0.0)

    def keep(self, dropped_CV: Tensor, rows_K: Tensor, ids_K: Tensor) -> None:
        local_K = ids_K - self.start
        here_K = (local_K >= 0) & (local_K < dropped_CV.shape[1])
        super().keep(dropped_CV, rows_K[here_K], local_K[here_K])


WHOLE = Vocabulary()
