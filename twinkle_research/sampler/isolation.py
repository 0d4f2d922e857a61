"""What an engine does to the process that it lives in, undone: generators, threads, garbage collection, process groups."""

from __future__ import annotations

import contextlib
import gc
import random
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

# vLLM keeps its process groups in module variables, which all engines of a process share.
_alive = 0
_world_is_ours = True  # the default group was there before the first engine


@contextlib.contextmanager
def isolated_generators(device: torch.device) -> Iterator[None]:
    """The global generators of Python, numpy and torch continue as if nothing had been drawn or seeded inside."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 (the one to be protected)
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002


@contextlib.contextmanager
def contained_construction(device: torch.device) -> Iterator[None]:
    """Building an engine seeds all generators, replaces ``torch.set_num_threads`` by a function that does nothing, sets
    the precision of float32 products, freezes the garbage collector's objects and binds the process to a memory node."""
    global _alive, _world_is_ours
    if not _alive:
        _world_is_ours = dist.is_initialized()
    set_threads, threads = torch.set_num_threads, torch.get_num_threads()
    precision, collecting = torch.get_float32_matmul_precision(), gc.isenabled()
    frozen = gc.get_freeze_count() > 0
    gc.freeze()  # it collects several times, which is quick where there is little to look at
    try:
        with isolated_generators(device), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
        _alive += 1
    finally:
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
        if not frozen:
            gc.unfreeze()
        gc.enable() if collecting else gc.disable()


def shut_down(core: Any) -> None:
    """Ends an engine, an ``InprocClient``. Collective.

    vLLM would destroy all process groups, the trainer's included, and break other engines in the process. So only the last
    engine destroys vLLM's own groups, and the default group only where vLLM made it.
    """
    import vllm.v1.engine.core as engine_core

    global _alive
    _alive -= 1
    clean_up, destroy = engine_core.cleanup_dist_env_and_memory, dist.destroy_process_group

    def destroy_one(group: dist.ProcessGroup | None = None) -> None:
        if group is not None and group is not dist.group.WORLD:
            destroy(group)

    if _alive > 0:
        engine_core.cleanup_dist_env_and_memory = lambda *args, **kwargs: None
    elif _world_is_ours:
        dist.destroy_process_group = dist.distributed_c10d.destroy_process_group = destroy_one
    try:
        core.shutdown()
    finally:
        engine_core.cleanup_dist_env_and_memory = clean_up
        dist.destroy_process_group = dist.distributed_c10d.destroy_process_group = destroy
