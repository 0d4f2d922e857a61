"""How long a step took, how fast that was and how much memory it needed. Nothing here decides anything."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from twinkle_research.distributed.gpus import GPUS

# Dense bf16 peak of one device in FLOP/s. Utilisation is null on any other device.
PEAK_FLOPS = {gpu.name: gpu.flops for gpu in GPUS.values()}


class StepClock:
    """Collects the named parts of one step, then gives the row for timing.jsonl."""

    def __init__(self, device: torch.device, parameters: int, trainable: int, world_size: int):
        self.device = device
        self.world_size = world_size
        # Forward 2N, backward by activations 2N, backward by weights 2 per trained weight (Kaplan et al. 2020).
        self.flops_per_token = 4 * parameters + 2 * trainable
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        self.peak = next((flops for key, flops in PEAK_FLOPS.items() if key in name), None)
        self.restart()

    def restart(self) -> None:
        self.parts: dict[str, float] = {}
        self.started = time.perf_counter()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        self.parts[name] = self.parts.get(name, 0.0) + time.perf_counter() - begun

    def row(self, tokens: int) -> dict[str, float | None]:
        """``tokens``: all that went through the model in this step, over all ranks, padding left out."""
        seconds = time.perf_counter() - self.started
        per_second = tokens / self.parts["train"]
        mfu = per_second * self.flops_per_token / (self.peak * self.world_size) if self.peak else None
        row = {"step_seconds": seconds, "tokens_per_second": per_second, "mfu": mfu, "memory/peak_gib": self._peak_gib()}
        row |= {f"time/{name}": spent for name, spent in self.parts.items()}
        self.restart()
        return row

    def _peak_gib(self) -> float:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 2**30
        unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes on macOS, in KiB on Linux
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
