"""The GPUs that a config plans for."""

from __future__ import annotations

from dataclasses import replace

from twinkle_research.distributed.gpus import GIB, GPUS, Hardware
from twinkle_research.trainer.config import LaunchConfig

PER_MACHINE = 8  # GPUs, where launch.nproc_per_node says nothing


def hardware_of(launch: LaunchConfig) -> Hardware | None:
    """With what the config says better about them; None where it names none."""
    if launch.gpu is None:
        return None
    given = {
        "memory": None if launch.gpu_memory_gib is None else launch.gpu_memory_gib * GIB,
        "node": None if launch.node_gbytes is None else launch.node_gbytes * 1e9,
        "network": None if launch.network_gbytes is None else launch.network_gbytes * 1e9,
    }
    return replace(GPUS[launch.gpu.value], **{name: value for name, value in given.items() if value is not None})
