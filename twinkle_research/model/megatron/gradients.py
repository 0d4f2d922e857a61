"""Gradient sums in the buffers of Megatron-Core's DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from torch import Tensor, nn

from twinkle_research.errors import ConfigError, UserError
from twinkle_research.model.layout import Layout
from twinkle_research.model.megatron.ranges import ranges_of
from twinkle_research.model.megatron.shim import device_shim

if TYPE_CHECKING:
    from twinkle_research.distributed.runtime import Runtime
    from twinkle_research.model.megatron.build import PolicyModel
    from twinkle_research.model.megatron.mesh import Mesh


class MeshGradients:
    """What the backward passes of ``accumulating`` add to ``parameters`` (name -> parameter of ``chunks``): float32 sums over
    this process's part of the rows, until ``all_reduce`` makes them sums over all. With the distributed optimizer a process
    then has the sums of its own range only.

    Each chunk gets a DistributedDataParallel for these parameters alone; there may be others on it, for other parameters.
    """

    bucket_elements: int | None = None  # reduced, or gathered, at a time where that overlaps with passes; None: mcore's default

    def __init__(self, parameters: Mapping[str, nn.Parameter], mesh: Mesh, chunks: list[PolicyModel]) -> None:
        self.parameters = dict(parameters)
        self.chunks = chunks
        self._mesh = mesh
        self._overlaps = mesh.layout.overlap_grad_reduce
        self.distributed = mesh.layout.distributed_optimizer
        self._gathers_late = self.distributed and mesh.layout.overlap_param_gather
        self._calls = 0  # of accumulating since the last clear
        self._stale: set[int] = set()  # numbers of the chunks whose weights are still to be gathered after an update
        self._check_places()
        config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, overlap_grad_reduce=self._overlaps, overlap_param_gather=self._gathers_late,
            use_distributed_optimizer=self.distributed, bucket_size=self.bucket_elements,
        )  # fmt: skip
        for parameter in self.parameters.values():
            parameter.requires_grad_(True)
        with device_shim(), self.alone():
            self.wrapped = [
                DistributedDataParallel(chunk.config, config, chunk, disable_bucketing=i > 0) for i, chunk in enumerate(chunks)
            ]
        self.ranges = ranges_of(self.wrapped) if self.distributed else {}
        self._hooks = [chunk.register_forward_hook(self._gather_rest(i)) for i, chunk in enumerate(chunks) if self._gathers_late]

    def _check_places(self) -> None:
        own = set(self.parameters.values())
        held = {parameter for chunk in self.chunks for parameter in chunk.parameters()}
        if not own <= held:
            raise ValueError("what is trained must lie in the chunks of the model")
        # Weights that come late are waited for where the module that has them is called; those of a LoRA are used elsewhere.
        if self._gathers_late and own != held:
            raise ConfigError(
                "backend.overlap_param_gather=true needs all weights to be trained; with an adapter set it to false"
            )

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within it these parameters require a gradient, and no others: mcore wraps, reduces and updates what does."""
        own = set(self.parameters.values())
        before = [(p, p.requires_grad) for chunk in self.chunks for p in chunk.parameters()]
        for parameter, _ in before:
            parameter.requires_grad_(parameter in own)
        try:
            yield
        finally:
            for parameter, required in before:
                parameter.requires_grad_(required)

    # --- passes -------------------------------------------------------------------------------------------------

    @contextmanager
    def accumulating(self) -> Iterator[list[DistributedDataParallel]]:
        """The chunks to give to mcore's schedule for passes with gradients.

        With overlap_grad_reduce the last backward pass of the schedule sums over processes: each parameter must then get a
        gradient in it, on every process, and the window ends. UserError where there was such a pass already.
        """
        if self._overlaps and self._calls:
            raise UserError(
                "backend.overlap_grad_reduce=true sums gradients over processes in the first forward_backward of an "
                "accumulation window; give it all rows of the window, or set it to false"
            )
        self._calls += 1
        config = self.chunks[0].config  # that of all chunks, and of everything else that is trained on them
        no_sync = [wrapped.no_sync for wrapped in self.wrapped]
        config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
        try:
            yield self.wrapped
        finally:
            config.no_sync_func = None

    def _gather_rest(self, number: int) -> Callable[..., None]:
        """A hook behind the forward pass of a chunk: modules have waited for their weights, but some are used outside of
        them (the vocabulary projection)."""

        def hook(*_: Any) -> None:
            for group in _bucket_groups(self.wrapped[number]):
                group.finish_param_sync(skip_next_bucket_dispatch=True)
            self._stale.discard(number)

        return hook

    def updated(self) -> None:
        """After an optimizer step."""
        if self._gathers_late:
            self._stale = set(range(len(self.chunks)))

    def settle(self) -> None:
        """Before weights are read or changed outside a forward pass: gathers what is still to be gathered. Collective."""
        with device_shim():
            for number in sorted(self._stale):
                self.wrapped[number].start_param_sync(force_sync=True)
        self._stale.clear()

    # --- the sums -----------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Tensor]:
        """name -> gradient sum of this process's part of the parameter."""
        return {name: parameter.main_grad for name, parameter in self.parameters.items()}

    def all_reduce(self, runtime: Runtime) -> None:
        """Sums over the processes that share a parameter, have a part of its rows, or hold it a second time. Collective."""
        with device_shim(), self.alone(), torch.no_grad():
            finalize_model_grads(self.wrapped)

    def scale_(self, factor: float) -> None:
        if factor != 1.0:
            for wrapped in self.wrapped:
                wrapped.scale_gradients(factor)

    def clear(self) -> None:
        self._calls = 0
        for parameter in self.parameters.values():
            parameter.grad = None
        for wrapped in self.wrapped:
            for group in _bucket_groups(wrapped):
                if group.grad_reduce_handle is not None:  # of a window that is given up: sums on their way write here
                    group.grad_reduce_handle.wait()
                    group.grad_reduce_handle = None
            wrapped.zero_grad_buffer()

    def close(self) -> None:
        """Forgets the parameters: what reaches them no longer comes here."""
        self.settle()
        for hook in self._hooks:
            hook.remove()
        for wrapped in self.wrapped:
            # Not by disable_forward_pre_hook: a value head may have come into the chunk since, which has no such hook.
            for hook in wrapped.remove_forward_pre_hook_handles.values():
                hook.remove()
            wrapped.remove_forward_pre_hook_handles.clear()
            # mcore's hooks hang on the autograd nodes of the parameters, which may live longer than this. Those that a layer of
            # experts remembers would otherwise keep the layer, by way of the hooks.
            wrapped.param_to_bucket_group.clear()
            wrapped.grad_accs.clear()
            wrapped.module = None
        for parameter in self.parameters.values():
            parameter.grad = None
            del parameter.main_grad

    # --- an open window in a checkpoint -------------------------------------------------------------------------

    def consolidate(self, runtime: Runtime) -> None:
        """Leaves the sums on one process for each part of a parameter, so that what is added afterwards, anywhere, adds to
        them. Collective."""
        if self._overlaps:
            raise UserError(
                "an open accumulation window cannot be saved with backend.overlap_grad_reduce=true; save after step, or set it "
                "to false"
            )
        self.all_reduce(runtime)
        for name, parameter in self.parameters.items():
            if parameter in self.ranges:
                ranges = self.ranges[parameter]
                whole = ranges.whole(parameter.shape, parameter.main_grad.view(-1)[ranges.own])
                parameter.main_grad.copy_(whole)
            if not self._counts(name, parameter):
                parameter.main_grad.zero_()

    def restore(self, name: str, gradient: Tensor, runtime: Runtime) -> None:
        """Adds a sum that ``consolidate`` left, here in the part that this process has of it."""
        parameter = self.parameters[name]
        if self._counts(name, parameter):
            parameter.main_grad.add_(gradient.to(parameter.main_grad.device))

    def _counts(self, name: str, parameter: nn.Parameter) -> bool:
        """Whether this is the first of the processes over which ``all_reduce`` sums the parameter. It is also the lowest of
        those that hold it."""
        mesh, config = self._mesh, self.chunks[0].config
        if getattr(parameter, "allreduce", True):  # mcore's mark of experts is False
            replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
        else:
            replicas = parallel_state.get_expert_data_parallel_group()
        over_sequence = config.sequence_parallel and getattr(parameter, "sequence_parallel", False)
        of_heads = config.qk_layernorm and ("q_layernorm" in name or "k_layernorm" in name)
        twice = getattr(parameter, "shared_embedding", False)  # at both ends of the pipeline
        return not (dist.get_rank(replicas) or ((over_sequence or of_heads) and mesh.tp.rank) or (twice and mesh.pp.rank))


class MeshLayout(Layout):
    """Parameters are whole as far as an optimizer is concerned, but may have to be gathered before they are looked at."""

    gradients: MeshGradients

    def release(self) -> None:
        self.gradients.settle()


def _bucket_groups(wrapped: DistributedDataParallel) -> list[Any]:
    return wrapped.bucket_groups + wrapped.expert_parallel_bucket_groups
