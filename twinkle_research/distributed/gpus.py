"""What is known of kinds of GPU, from their vendor's data sheets. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30


def gib(size: float) -> str:
    """Bytes as GiB, for people."""
    return f"{size / GIB:.2f}" if size >= 0.005 * GIB else "< 0.01"


@dataclass(frozen=True)
class Hardware:
    """One GPU of a job. ``memory``: bytes that a process can use; ``flops``: dense bfloat16 peak, FLOP/s; ``bandwidth``: of its
    own memory; ``node`` and ``network``: what it sends to GPUs of its machine and of others. All B/s, in one direction."""

    name: str
    memory: float
    flops: float
    bandwidth: float
    node: float
    network: float


# By the name that launch.gpu has for them. Memory as torch shows it on these devices, rounded down. Network: an adapter of 200
# (A100) or 400 Gbit/s for each GPU.
GPUS = {
    "a100_80gb": Hardware("A100", 79 * GIB, 312e12, 2.0e12, 300e9, 25e9),
    "h100_80gb": Hardware("H100", 79 * GIB, 989e12, 3.35e12, 450e9, 50e9),
    "h200_141gb": Hardware("H200", 139 * GIB, 989e12, 4.8e12, 450e9, 50e9),
    "b200_180gb": Hardware("B200", 178 * GIB, 2250e12, 7.7e12, 900e9, 50e9),
}
