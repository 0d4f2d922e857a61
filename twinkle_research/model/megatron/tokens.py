"""Which tokens of which rows a process has in a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor


@dataclass(frozen=True)
class LocalTokens:
    """``documents``: (sample index in the step, tokens) of each real document of the micro-batch, padding excluded.

    ``where`` [T]: for each position of this process the index of its token among all those of ``documents``, one after the
    other; -1 on padding. T counts the positions that are left of the batch by context parallelism, before sequence
    parallelism cuts them once more.
    """

    documents: tuple[tuple[int, int], ...]
    where: Tensor
    step: int


@dataclass
class KeyedSeqParams(PackedSeqParams):
    """What mcore hands from a micro-batch to its layers, in the forward pass and where a layer is computed again for the
    backward pass, while other micro-batches are on their way: so the tokens travel with it."""

    tokens: LocalTokens | None = None
