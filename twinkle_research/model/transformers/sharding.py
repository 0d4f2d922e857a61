"""FSDP2 (torch's ``fully_shard``) for a transformers model: each rank keeps its rows of every weight, and a layer's weights
are whole only while it runs (Rajbhandari et al. 2019, ZeRO stage 3, arXiv:1910.02054; Zhao et al. 2023, arXiv:2304.11277).

What is added to the model afterwards (a LoRA) is not sharded: it is small, and summed over ranks as without sharding.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from twinkle_research.errors import ConfigError
from twinkle_research.loss.base import TokenScores
from twinkle_research.model.layout import RowShards
from twinkle_research.model.transformers.loading import load_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from twinkle_research.checkpoint.stream import TensorFolder
    from twinkle_research.distributed.runtime import Runtime


class ShardedModel:
    """``module``: on the meta device, its buffers real; afterwards it holds this rank's rows of the weights in ``folder``.

    ``dtype``: what it computes in. With ``trained`` low-precision weights are kept in float32 and rounded when they are
    gathered: the shards are their own masters, and gradients are summed over ranks in float32.
    """

    def __init__(
        self, module: PreTrainedModel, runtime: Runtime, dtype: torch.dtype, folder: TensorFolder, *, trained: bool
    ) -> None:
        self.module = module
        kept = torch.promote_types(dtype, torch.float32) if trained else dtype
        for parameter in module.parameters():
            parameter.data = parameter.data.to(kept)
            parameter.requires_grad_(trained)
        shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
        self.layout = _Shards(self, runtime, shapes, dtype)
        self._units = self._shard(runtime, MixedPrecisionPolicy(dtype, kept) if kept != dtype else MixedPrecisionPolicy())
        self._allocate(runtime.device)
        # The same memory as FSDP's own parameters: what changes here is gathered by the next forward pass.
        self.parameters = {name: nn.Parameter(p.to_local().detach(), p.requires_grad) for name, p in module.named_parameters()}
        for name, parameter in module.named_parameters():
            if trained:
                parameter.register_post_accumulate_grad_hook(_mover(self.parameters[name]))
        load_weights(module, folder, self.parameters, self.layout)

    def _shard(self, runtime: Runtime, policy: MixedPrecisionPolicy) -> list[FSDPModule]:
        mesh = init_device_mesh(runtime.device.type, (runtime.world_size,))
        module = self.module
        # For the passes that do not go through the model's own forward method; see run.
        module.run_sharded = types.MethodType(lambda module, function: function(), module)
        units = [fully_shard(layer, mesh=mesh, mp_policy=policy) for layer in layers_of(module)]
        units.append(fully_shard(module, mesh=mesh, mp_policy=policy))
        register_fsdp_forward_method(module, "run_sharded")
        for unit in units:  # sums over ranks, as everywhere here, instead of means
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
        # Whether a parameter is reached may differ between ranks (an expert, a rank without rows).
        units[-1].set_reduce_scatter_unused_params(True)
        return units

    def _allocate(self, device: torch.device) -> None:
        buffers = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        self.module.to_empty(device=device)
        for name, buffer in self.module.named_buffers():
            buffer.copy_(buffers[name])

    def run(self, function: Callable[[], TokenScores]) -> TokenScores:
        """``function()`` with the weights outside the layers whole (embeddings, final norm, output projection), in forward
        and backward. Every rank must run as many passes, forward and backward, in the same order. Collective."""
        if not torch.is_grad_enabled():
            self.release()

        def tensors() -> dict[str, Tensor]:  # FSDP hooks into the backward pass of the tensors that it sees
            scores = function()
            found = {field.name: getattr(scores, field.name) for field in fields(scores)}
            return {name: tensor.clone() for name, tensor in found.items() if tensor is not None}  # it takes no views

        scores = TokenScores(**self.module.run_sharded(tensors))
        if not torch.is_grad_enabled():
            self.release()
        return scores

    def release(self) -> None:
        """Lets go of the gathered weights. FSDP2 itself keeps those outside the layers until the next backward pass, and
        would go on using them after an update."""
        for unit in self._units:
            unit.reshard()


class _Shards(RowShards):
    def __init__(self, model: ShardedModel, runtime: Runtime, shapes: dict[str, torch.Size], dtype: torch.dtype) -> None:
        super().__init__(runtime, shapes, dtype)
        self._model = model

    def release(self) -> None:
        self._model.release()


def _mover(own: nn.Parameter) -> Callable[[Tensor], None]:
    """Adds the gradient that FSDP leaves at its parameter, a sum over ranks, to that of this rank's part."""

    def move(parameter: Tensor) -> None:
        gradient = parameter.grad.to_local()
        own.grad = gradient if own.grad is None else own.grad.add_(gradient)
        parameter.grad = None

    return move


def layers_of(module: PreTrainedModel) -> Iterator[nn.Module]:
    """The decoder layers: what transformers itself never splits over devices, outermost first."""
    names = set(module._no_split_modules or ())
    found: list[str] = []
    for name, child in module.named_modules():
        if type(child).__name__ in names and not any(name.startswith(f"{outer}.") for outer in found):
            found.append(name)
            yield child
    if not found:
        raise ConfigError(f"model {type(module).__name__} does not name its layers; backend.sharding=fsdp2 cannot cut it")
