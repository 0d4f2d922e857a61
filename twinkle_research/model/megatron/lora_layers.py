"""LoRA beside one of Megatron-Core's parallel linear layers, with the arithmetic of PEFT's ``Linear``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import Tensor, nn

from twinkle_research.errors import UserError
from twinkle_research.model.dropout import document_mask
from twinkle_research.model.lora_config import initial_a
from twinkle_research.model.megatron.blocks import WholeLinear
from twinkle_research.model.megatron.mesh import Mesh
from twinkle_research.model.megatron.pieces import Piece, whole_index
from twinkle_research.model.megatron.tokens import LocalTokens


@dataclass(frozen=True)
class Rank:
    """What PEFT makes of one module: ``name`` is the module's in PEFT's files, ``inputs`` its whole width."""

    name: str
    rank: int
    scaling: float
    dropout: float
    inputs: int

    @property
    def names(self) -> tuple[str, str]:
        return f"{self.name}.lora_A.weight", f"{self.name}.lora_B.weight"


@dataclass(frozen=True)
class Factors:
    """This process's part of y += scaling * B A dropout(x). float32 as in PEFT, whatever the base has."""

    rank: Rank
    a: nn.Parameter  # [r, inputs], inputs cut where the base is row-parallel
    b: nn.Parameter  # [outputs, r], outputs cut where the base is column-parallel


class Site:
    """One linear layer of this process, parallel or whole. ``tensors``: the parts of its weight, one for each Hugging Face matrix
    in it; their rows lie in ``groups`` equal groups, in each those of the first, then those of the second ...

    ``active``: the factors that are computed, one for each of ``tensors``, None for a matrix without; None for none at all.
    """

    def __init__(
        self,
        linear: ColumnParallelLinear | RowParallelLinear | WholeLinear,
        memory: str,
        tensors: list[Piece],
        groups: int,
        mesh: Mesh,
    ) -> None:
        self.linear = linear
        self.memory = memory
        self.tensors = tensors
        self.groups = groups
        self.mesh = mesh
        self.column, self.row = isinstance(linear, ColumnParallelLinear), isinstance(linear, RowParallelLinear)
        self.splits_sequence = mesh.sequence_parallel and mesh.tp.size > 1
        self.active: list[Factors | None] | None = None

    # --- parameters ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def make(self, tensor: Piece, rank: Rank, seed: int) -> Factors:
        """With the values that PEFT's layer would start from: A drawn whole and then cut, so that the layout does not matter."""
        device = self.linear.weight.device
        (a_index, b_index), (a_name, _) = self._indices(tensor, rank), rank.names
        a = initial_a(seed, a_name, (rank.rank, rank.inputs))[a_index].to(device, copy=True)
        b = torch.zeros(b_index[0].stop - b_index[0].start, rank.rank, device=device)
        factors = Factors(rank, nn.Parameter(a, requires_grad=False), nn.Parameter(b, requires_grad=False))
        set_tensor_model_parallel_attributes(factors.a, self.row, 1, 1)
        set_tensor_model_parallel_attributes(factors.b, self.column, 0, 1)
        # A factor that every rank has whole sees its part of the sequence only: mcore sums gradients with this mark.
        factors.a.sequence_parallel = self.splits_sequence and not self.row
        factors.b.sequence_parallel = self.splits_sequence and not self.column
        return factors

    def parts(self, tensor: Piece, factors: Factors) -> Iterator[tuple[str, nn.Parameter, Piece]]:
        """(name on disk, parameter, where it lies) of both factors."""
        rank = factors.rank
        shapes = ((rank.rank, rank.inputs), (tensor.shape[0], rank.rank))
        both = zip(rank.names, (factors.a, factors.b), shapes, self._indices(tensor, rank), strict=True)
        for i, (name, parameter, shape, index) in enumerate(both):
            yield name, parameter, Piece(name, shape, index, place=(*tensor.place, i))

    def _indices(self, tensor: Piece, rank: Rank) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        rows, columns = tensor.index
        (whole,) = whole_index((rank.rank,))
        return (whole, columns), (rows, whole)

    # --- forward ------------------------------------------------------------------------------------------------

    def add(
        self, args: tuple[Any, ...], output: tuple[Any, ...], tokens: LocalTokens | None, seed: int
    ) -> tuple[Any, ...] | None:
        """The output of the linear layer with the LoRA's added, of which only the sum is rounded."""
        if self.active is None:
            return None
        x = args[0].float()
        low = torch.cat([F.linear(self._dropped(x, f.rank, tokens, seed), f.a) for f in self.active if f], dim=-1)
        group = self.mesh.tp.group
        if not (self.column or self.row):
            pass  # all of it is here
        elif not self.splits_sequence:
            low = (copy_to_tensor_model_parallel_region if self.column else reduce_from_tensor_model_parallel_region)(low, group)
        elif self.column:
            low = gather_from_sequence_parallel_region(low, tensor_parallel_output_grad=True, group=group)
        else:
            low = reduce_scatter_to_sequence_parallel_region(low, group=group)
        lows = iter(low.split([f.rank.rank for f in self.active if f], dim=-1))
        y, *rest = output
        ys = [
            F.linear(next(lows), f.b) * f.rank.scaling if f else y.new_zeros(*y.shape[:-1], tensor.size[0], dtype=x.dtype)
            for f, tensor in zip(self.active, self.tensors, strict=True)
        ]
        grouped = [part.unflatten(-1, (self.groups, -1)) for part in ys]
        added = torch.cat(grouped, dim=-1).flatten(-2) if len(ys) > 1 else ys[0]
        return (y + added).to(y.dtype), *rest

    def _dropped(self, x: Tensor, rank: Rank, tokens: LocalTokens | None, seed: int) -> Tensor:
        if not self.linear.training or rank.dropout == 0.0:
            return x
        name = f"{rank.name}.lora_dropout"
        if tokens is None:
            raise UserError(f"dropout of {name} ran in training mode outside forward_backward: its mask has no key")
        where, columns = tokens.where.to(x.device), slice(None)
        if self.row:
            width = x.shape[-1]
            columns = slice(self.mesh.tp.rank * width, (self.mesh.tp.rank + 1) * width)
        elif self.splits_sequence:
            where = where.chunk(self.mesh.tp.size)[self.mesh.tp.rank]
        masks = [
            document_mask(rank.dropout, seed, tokens.step, sample, name, (length, rank.inputs), x)[:, columns]
            for sample, length in tokens.documents
        ]
        masks.append(x.new_ones(1, x.shape[-1]))  # padding, whose index is -1
        return x * torch.cat(masks)[where][:, None]

    # --- merging ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def merged(self, weight: Tensor, factors: list[Factors | None]) -> Tensor:
        """``weight``, of the local layer, with the LoRA added in float32 and rounded once."""
        exact = weight.to(torch.promote_types(weight.dtype, torch.float32), copy=True)
        for tensor, f in zip(self.tensors, factors, strict=True):
            if f:
                view = tensor.view(exact)
                view.add_(((f.b @ f.a) * f.rank.scaling).view(view.shape))
        return exact.to(weight.dtype)
