"""The ranks of one run as the trainer sees them: device, reductions, agreed stop."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
import torch.distributed as dist

from twinkle_research.distributed.env import WorldInfo, detect, usable_cores
from twinkle_research.distributed.signals import StopSignals
from twinkle_research.errors import ConfigError
from twinkle_research.model.config import Device

if TYPE_CHECKING:
    from twinkle_research.trainer.config import LaunchConfig

T = TypeVar("T")


@dataclass
class Runtime:
    """One rank. With ``world_size`` 1 there is no process group and every collective is the identity.

    All methods but ``close`` are collective: every rank calls them, in the same order.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    device: torch.device = torch.device("cpu")
    stop: StopSignals | None = None
    # Objects and flags travel over gloo, beside the device's own backend.
    host_group: dist.ProcessGroup | None = None

    @classmethod
    def start(
        cls,
        launch: LaunchConfig | None = None,
        device: Device = Device.auto,
        world: WorldInfo | None = None,
        stop: StopSignals | None = None,
        listen_fd: int | None = None,
    ) -> Runtime:
        """Chooses the device, sets threads and joins the process group. ``world``: by default what torchrun or srun say.

        ``listen_fd``: a listening socket on master_addr:master_port that the launcher hands to rank 0, so that nobody
        can take the port in between. Raises ConfigError where a GPU is asked for and there is none for this rank.
        """
        from twinkle_research.trainer.config import LaunchConfig

        launch = launch or LaunchConfig()
        world = world or detect()
        place = choose_device(device, world)
        set_threads(launch.threads, place, world.local_world_size)
        runtime = cls(world.rank, world.world_size, world.local_rank, place, stop)
        if world.world_size > 1:
            timeout = timedelta(minutes=launch.timeout_minutes)
            if stop is None:
                runtime._join(world, timeout, listen_fd)
            else:
                with stop.leaving_on_first():
                    runtime._join(world, timeout, listen_fd)
        return runtime

    def _join(self, world: WorldInfo, timeout: timedelta, listen_fd: int | None) -> None:
        store = dist.TCPStore(
            world.master_addr,
            world.master_port,
            world.world_size,
            # torchrun's agent already serves a store on that port; elsewhere rank 0 does.
            is_master=world.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
            timeout=timeout,
            master_listen_fd=listen_fd,
        )
        on_gpu = self.device.type == "cuda"
        dist.init_process_group(
            backend="cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            store=dist.PrefixStore(f"twinkle/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store),
            rank=world.rank,
            world_size=world.world_size,
            timeout=timeout,
            device_id=self.device if on_gpu else None,
        )
        self.host_group = dist.new_group(backend="gloo", timeout=timeout) if on_gpu else dist.group.WORLD

    def apart(self) -> Runtime:
        """The same ranks, whose objects and flags travel in a group of their own: for a thread beside this one. Waiting in it
        has no end as long as all ranks are there."""
        if self.world_size == 1:
            return self
        return replace(self, host_group=dist.new_group(backend="gloo", timeout=timedelta(days=7)))

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @overload
    def all_reduce_sum(self, value: torch.Tensor) -> torch.Tensor: ...
    @overload
    def all_reduce_sum(self, value: int) -> int: ...
    @overload
    def all_reduce_sum(self, value: float) -> float: ...
    def all_reduce_sum(self, value: torch.Tensor | float) -> torch.Tensor | float:
        """Sum over ranks. A tensor is summed in place and returned; a number is summed in float64 (an int in int64)."""
        if self.world_size == 1:
            return value
        if isinstance(value, torch.Tensor):
            dist.all_reduce(value, op=dist.ReduceOp.SUM)
            return value
        dtype = torch.int64 if isinstance(value, int) else torch.float64
        return self._reduce(torch.tensor([value], dtype=dtype), dist.ReduceOp.SUM).item()

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank."""
        return bool(self.max(int(flag)))

    def max(self, value: int) -> int:
        """The largest value of all ranks."""
        return value if self.world_size == 1 else int(self._reduce(torch.tensor([value]), dist.ReduceOp.MAX).item())

    def stop_requested(self) -> bool:
        """Whether any rank was asked to stop (signals.py): the same answer on all ranks, once a step."""
        return self.any(self.stop is not None and self.stop.requested)

    def broadcast_object(self, value: T) -> T:
        """Rank 0's ``value`` on every rank."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.host_group, device=torch.device("cpu"))
        return box[0]

    def gather_objects(self, value: T) -> list[T]:
        """The values of all ranks in rank order, on every rank."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.host_group)
        return values

    def barrier(self) -> None:
        self.any(False)

    def close(self) -> None:
        """Leaves the process group. Only after a barrier: a rank still in a collective would see a lost peer."""
        if self.world_size > 1:
            dist.destroy_process_group()

    def _reduce(self, value: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
        dist.all_reduce(value, op=op, group=self.host_group)
        return value


def choose_device(device: Device, world: WorldInfo) -> torch.device:
    """This rank's device: ``cpu``, or the GPU of its local rank."""
    count = torch.cuda.device_count() if device is not Device.cpu else 0
    if device is Device.cpu or (device is Device.auto and count == 0):
        return torch.device("cpu")
    if count == 0:
        raise ConfigError("backend.device=cuda, but torch sees no GPU here; backend.device=auto or cpu runs without one")
    # A scheduler may show each task its own GPU only.
    index = 0 if world.kind == "slurm" and count == 1 else world.local_rank
    if index >= count:
        raise ConfigError(
            f"launch.nproc_per_node={world.local_world_size} needs as many GPUs, but {count} are visible on this machine; "
            f"give launch.nproc_per_node={count} or backend.device=cpu"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def set_threads(threads: int | None, device: torch.device, local_world_size: int) -> None:
    """``launch.threads``, else OMP_NUM_THREADS where it is set, else on CPU an equal share of the cores."""
    if threads is None and device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, usable_cores() // local_world_size)
    if threads is not None:
        torch.set_num_threads(threads)
