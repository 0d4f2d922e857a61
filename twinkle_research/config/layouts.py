"""How a backend lies on processes, before any of them is started: how many it needs, how many share the data, how to say it."""

import math
from collections.abc import Iterable

from twinkle_research.model.config import Sharding, TransformersBackendConfig
from twinkle_research.model.megatron.config import (
    MegatronBackendConfig,
    expert_processes,
    expert_tensor_parallel,
    model_processes,
)

Backend = TransformersBackendConfig | MegatronBackendConfig


def fewest_processes(backend: Backend) -> int:
    """The smallest number of processes that the layout fits on; its multiples do, too."""
    if not isinstance(backend, MegatronBackendConfig):
        return 1
    return math.lcm(model_processes(backend), expert_processes(backend))


def default_processes(backend: Backend, gpus: int) -> int:
    """On one machine, where ``launch.nproc_per_node`` says nothing: one a GPU where the layout can use them all."""
    if isinstance(backend, MegatronBackendConfig):
        return max(gpus, fewest_processes(backend))
    return max(1, gpus) if backend.sharding in (Sharding.ddp, Sharding.fsdp2) else 1


def data_parallel_size(backend: Backend, world_size: int) -> int:
    """Shares that a global batch is dealt into."""
    return world_size // model_processes(backend) if isinstance(backend, MegatronBackendConfig) else world_size


def layout_text(backend: Backend, nodes: int, nproc: int) -> str:
    world_size = nodes * nproc
    machines = f" ({nodes} machines x {nproc})" if nodes > 1 else ""
    if world_size == 1:
        return "one process"
    if isinstance(backend, MegatronBackendConfig):
        return _megatron_text(backend, world_size) + machines
    sharded = backend.sharding is Sharding.fsdp2
    how = "data-parallel, the model sharded," if sharded else "data-parallel"
    return f"{how} over {world_size} processes{machines}"


def _megatron_text(backend: MegatronBackendConfig, world_size: int) -> str:
    stages = f"pipeline {backend.pipeline_parallel}"
    if backend.virtual_stages > 1:
        stages += f" ({backend.virtual_stages} chunks each)"
    parts = [(backend.tensor_parallel, f"tensor {backend.tensor_parallel}"), (backend.pipeline_parallel, stages)]
    parts.append((backend.context_parallel, f"context {backend.context_parallel}"))
    text = " x ".join([name for size, name in parts if size > 1] + [f"data {data_parallel_size(backend, world_size)}"])
    if backend.expert_parallel > 1 or backend.expert_tensor_parallel is not None:
        tensor = expert_tensor_parallel(backend)
        text += f", experts {backend.expert_parallel}" + (f" x tensor {tensor}" if tensor > 1 else "")
    return text


def neighbours(value: int, valid: Iterable[int]) -> str:
    """Of ``valid``, which does not have ``value``, the next number below and the next one above: "2 or 4"."""
    numbers = sorted(valid)
    below, above = [n for n in numbers if n < value][-1:], [n for n in numbers if n > value][:1]
    return " or ".join(map(str, below + above))


def divisors(*numbers: int) -> list[int]:
    """What divides all of them; zeros (not known) do not count."""
    common = math.gcd(*numbers)
    return [number for number in range(1, common + 1) if common % number == 0] or [1]


def beside(number: int, step: int, most: float = math.inf) -> str:
    """The multiples of ``step``, up to ``most``, below and above ``number``, or itself where it is one."""
    below = number // step * step
    return str(number) if below == number else neighbours(number, [n for n in (below, below + step) if 0 < n <= most])
