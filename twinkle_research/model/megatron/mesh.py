"""The processes as Megatron-Core divides them: who shares matrices, layers, sequences, experts and data."""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from twinkle_research.distributed.runtime import Runtime
from twinkle_research.errors import ConfigError, UserError
from twinkle_research.model.megatron.config import MegatronBackendConfig, expert_processes, model_processes
from twinkle_research.model.megatron.shim import device_shim

T = TypeVar("T")


@dataclass(frozen=True)
class Axis:
    """This process's place along one kind of parallelism."""

    rank: int
    size: int
    group: dist.ProcessGroup

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1


class Shares(Runtime):
    """Reductions that count each data-parallel share once, on all ranks. The processes of one share (tensor, pipeline and
    context parallelism) work on the same rows; the one that speaks for it is the first of the last stage."""

    def __init__(self, runtime: Runtime, rank: int, size: int, speaks: bool) -> None:
        super().__init__(rank, size, runtime.local_rank, runtime.device, runtime.stop, runtime.host_group)
        self._runtime = runtime
        self._speaks = speaks

    @property
    def is_main(self) -> bool:
        return self._runtime.is_main

    def gather_objects(self, value: T) -> list[T]:
        found = self._runtime.gather_objects((self.rank, value) if self._speaks else None)
        return [own for _, own in sorted((item for item in found if item is not None), key=lambda item: item[0])]

    def all_reduce_sum(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            raise TypeError("tensors are summed over the groups of the mesh, not over shares")
        values = self.gather_objects(value)
        return sum(values) if isinstance(value, int) else math.fsum(values)

    def max(self, value: int) -> int:
        return self._runtime.max(value)

    def broadcast_object(self, value: T) -> T:
        return self._runtime.broadcast_object(value)


class Mesh:
    """Megatron-Core's process groups. A process can be part of one mesh at a time: ``open`` gives the same one again for the
    same layout, until ``close`` was called as often."""

    _present: Mesh | None = None

    @classmethod
    def open(cls, runtime: Runtime, layout: MegatronBackendConfig) -> Mesh:
        """Collective. UserError where a mesh of another layout is open."""
        present = cls._present
        if present is None:
            cls._present = present = cls(runtime, layout)
        elif present.runtime is not runtime and present.runtime != runtime or present.layout != layout:
            raise UserError("a Megatron model of another layout is open in this process: close() it first")
        present._users += 1
        return present

    def __init__(self, runtime: Runtime, layout: MegatronBackendConfig) -> None:
        from megatron.core import parallel_state, tensor_parallel

        _check_processes(runtime.world_size, layout)
        logging.getLogger("megatron.core").setLevel(logging.ERROR)
        self.runtime = runtime
        self.layout = layout
        self._alone = not dist.is_initialized()
        if self._alone:
            # mcore asks groups for their size even in a single process.
            backend = "nccl" if runtime.device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        with device_shim():
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=layout.tensor_parallel,
                pipeline_model_parallel_size=layout.pipeline_parallel,
                virtual_pipeline_model_parallel_size=layout.virtual_stages if layout.virtual_stages > 1 else None,
                context_parallel_size=layout.context_parallel,
                expert_model_parallel_size=layout.expert_parallel,
                expert_tensor_parallel_size=layout.expert_tensor_parallel,
            )
            # No generator decides anything here (there is no dropout of mcore's), so its states need no tracking.
            tensor_parallel.model_parallel_cuda_manual_seed(0, inference_rng_tracker=True, force_reset_rng=True)
        self.rank = runtime.rank
        self.tp = _axis(parallel_state.get_tensor_model_parallel_group())
        self.pp = _axis(parallel_state.get_pipeline_model_parallel_group())
        self.cp = _axis(parallel_state.get_context_parallel_group())
        self.dp = _axis(parallel_state.get_data_parallel_group())
        self.ep = _axis(parallel_state.get_expert_model_parallel_group())
        self.etp = _axis(parallel_state.get_expert_tensor_parallel_group())
        speaks = self.tp.rank == 0 and self.cp.rank == 0 and self.pp.is_last
        self.shares = Shares(runtime, self.dp.rank, self.dp.size, speaks)
        self._users = 0

    @property
    def sequence_parallel(self) -> bool:
        wanted = self.layout.sequence_parallel
        return self.tp.size > 1 if wanted is None else wanted

    @property
    def experts_join_shares(self) -> bool:
        """Whether the processes that share a layer's experts work on several shares of the data, so that each of their passes
        waits for those of the others. Both are made of neighbouring processes."""
        return self.tp.size * self.cp.size % (self.ep.size * self.etp.size) > 0

    @property
    def data_parallel(self) -> tuple[int, int]:
        """(rank, size) of this process's share of the data."""
        return self.dp.rank, self.dp.size

    @property
    def same_rows(self) -> Sequence[int]:
        """Ranks of the pipeline that works on this process's rows, first stage first."""
        return dist.get_process_group_ranks(self.pp.group)

    def describe(self) -> dict[str, Any]:
        """JSON-able, for manifests."""
        sizes = {
            "tensor": self.tp.size, "pipeline": self.pp.size, "virtual_stages": self.layout.virtual_stages,
            "context": self.cp.size, "expert": self.ep.size, "expert_tensor": self.etp.size, "data": self.dp.size,
        }  # fmt: skip
        return {"world_size": self.runtime.world_size} | {name: size for name, size in sizes.items() if size > 1}

    def close(self) -> None:
        """Collective."""
        from megatron.core import parallel_state

        self._users -= 1
        if self._users != 0:
            return
        gc.collect()  # models and optimizers of mcore refer to themselves in circles and keep the groups alive
        groups = parallel_state._global_process_group_list or []
        parallel_state.destroy_model_parallel()
        for group in {id(group): group for group in groups if group in dist.distributed_c10d._world.pg_map}.values():
            if dist.get_backend(group) == "gloo":  # mcore forgets them, with their threads and sockets
                dist.destroy_process_group(group)
        if self._alone:
            dist.destroy_process_group()
        if Mesh._present is self:
            Mesh._present = None


def _check_processes(world_size: int, layout: MegatronBackendConfig) -> None:
    for number, what in (
        (model_processes(layout), "tensor_parallel x pipeline_parallel x context_parallel"),
        (expert_processes(layout), "expert_tensor_parallel x expert_parallel x pipeline_parallel"),
    ):
        if world_size % number:
            raise ConfigError(
                f"the layout's {what} = {number} must divide the number of processes, but there {_are(world_size)}: start them "
                "with torchrun and give the model runtime=Runtime.start()"
            )


def _are(count: int) -> str:
    return "is one" if count == 1 else f"are {count}"


def _axis(group: dist.ProcessGroup) -> Axis:
    return Axis(dist.get_rank(group), dist.get_world_size(group), group)
