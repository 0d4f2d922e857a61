"""Megatron-Core on a machine without CUDA: inside ``device_shim`` its calls for the present CUDA device mean the CPU.

Megatron-Core names CUDA in literals (``device="cuda"``, ``torch.cuda.current_device()``, streams, generator states). Where CUDA
exists nothing is changed. Elsewhere, for as long as the context is open, the names in ``patches`` are replaced, and a
TorchFunctionMode rewrites devices in calls of torch. Nothing stays behind, so other libraries in the process see torch as
it is. ``tests/model/megatron/test_shim.py`` fails where a version of Megatron-Core no longer has one of the names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.tensor_parallel import mappings
from torch.overrides import TorchFunctionMode

_GATHER, _REDUCE_SCATTER = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim
_depth = 0


class _CudaIsCpu(TorchFunctionMode):
    def __torch_function__(self, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if kwargs:
            if _is_cuda(kwargs.get("device")):
                kwargs = {**kwargs, "device": "cpu"}
            if kwargs.get("pin_memory"):
                kwargs = {**kwargs, "pin_memory": False}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], "cpu", *args[2:])
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:  # mcore's optimizers compare with names of CUDA types
            return func(*args).replace("torch.", "torch.cuda.")
        return func(*args, **(kwargs or {}))


def _is_cuda(device: Any) -> bool:
    return isinstance(device, str | torch.device) and str(device).startswith("cuda")


class _Stream:
    """In place of streams and events: work on a CPU is done when the call returns, so waiting and ordering do nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *error: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> _Stream:
        return self

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


_STREAM = _Stream()


def _nothing(*args: Any, **kwargs: Any) -> None: ...


def _generator_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_generator_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    torch.set_rng_state(state)


def _to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """mcore makes numbers of split sizes only where they lie on a GPU; gloo needs them too."""
    return tensor.cpu().numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _gather(x: torch.Tensor, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False) -> torch.Tensor:
    """gloo gathers parts of one length only: shorter ones are filled up, and cut again."""
    if output_split_sizes is None or group.size() == 1:
        return _GATHER(x, group, None, use_global_buffer)
    longest = max(output_split_sizes)
    filled = torch.cat((x, x.new_zeros(longest - len(x), *x.shape[1:])))
    parts = _GATHER(filled, group).unflatten(0, (group.size(), longest))  # longest may be 0
    return torch.cat([part[:size] for part, size in zip(parts, output_split_sizes, strict=True)])


def _reduce_scatter(x: torch.Tensor, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False) -> torch.Tensor:
    """The same for its inverse."""
    if input_split_sizes is None or group.size() == 1:
        return _REDUCE_SCATTER(x, group, None, use_global_buffer)
    longest = max(input_split_sizes)
    filled = [torch.cat((part, x.new_zeros(longest - len(part), *x.shape[1:]))) for part in x.split(input_split_sizes)]
    return _REDUCE_SCATTER(torch.cat(filled), group)[: input_split_sizes[group.rank()]]


def patches() -> list[tuple[Any, str, Any]]:
    """(object, attribute, what it is replaced by)."""
    import megatron.core.tensor_parallel.random as random
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    return [
        (torch.cuda, "current_device", lambda: torch.device("cpu")),
        (torch.cuda, "synchronize", _nothing),
        (torch.cuda, "Stream", _Stream),
        (torch.cuda, "Event", _Stream),
        (torch.cuda, "current_stream", lambda *args, **kwargs: _STREAM),
        (torch.cuda, "default_stream", lambda *args, **kwargs: _STREAM),
        (torch.cuda, "stream", lambda stream: contextlib.nullcontext()),
        (torch.cuda, "manual_seed", torch.manual_seed),
        (torch.cuda, "get_rng_state", _generator_state),
        (torch.cuda.random, "get_rng_state", _generator_state),
        (torch.Tensor, "record_stream", _nothing),
        (random, "_get_cuda_rng_state", _generator_state),
        (random, "_set_cuda_rng_state", _set_generator_state),
        (token_dispatcher, "maybe_move_tensor_to_cpu", _to_cpu),
        (mappings, "_gather_along_first_dim", _gather),
        (mappings, "_reduce_scatter_along_first_dim", _reduce_scatter),
    ]


def _mend_router() -> None:
    """mcore 0.16.1 reads a name in every router that it only defines beside Transformer Engine."""
    import megatron.core.transformer.moe.moe_utils as moe_utils

    if "te_general_gemm" not in vars(moe_utils):
        moe_utils.te_general_gemm = None


@contextmanager
def device_shim() -> Iterator[None]:
    """Around calls into Megatron-Core. May be nested; does nothing where CUDA is available."""
    global _depth
    if torch.cuda.is_available() or _depth:
        yield
        return
    _mend_router()
    saved = [(owner, name, getattr(owner, name)) for owner, name, _ in patches()]
    _depth += 1
    try:
        for owner, name, value in patches():
            setattr(owner, name, value)
        with _CudaIsCpu():
            yield
    finally:
        for owner, name, value in saved:
            setattr(owner, name, value)
        _depth -= 1
