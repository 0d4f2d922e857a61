"""The replacements with which Megatron-Core runs without CUDA: they hit names that exist, and nothing of them stays."""

import inspect

import pytest
import torch
from torch.overrides import TorchFunctionMode

from twinkle_research.model.megatron import shim
from twinkle_research.model.megatron.shim import device_shim, patches

NAMES = [f"{owner.__name__}.{name}" for owner, name, _ in patches()]


def present() -> list[object]:
    return [inspect.getattr_static(owner, name) for owner, name, _ in patches()]


def modes() -> int:
    """Function modes that are active."""
    return torch._C._len_torch_function_stack()


@pytest.fixture(autouse=True)
def without_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("number", range(len(NAMES)), ids=NAMES)
def test_what_is_replaced_exists_and_is_called_alike(number):
    """A replacement takes whatever the installed version's own takes."""
    owner, name, replacement = patches()[number]
    own = getattr(owner, name)
    assert callable(own) and callable(replacement)
    if inspect.isclass(own) or not inspect.isfunction(own):  # streams and events; methods written in C
        return
    taken, given = (list(inspect.signature(function).parameters.values()) for function in (replacement, own))
    if any(p.kind is p.VAR_POSITIONAL for p in (*taken, *given)):  # given: vLLM replaces some too where it has run
        return
    assert len(given) <= len(taken)


def test_nothing_is_replaced_outside():
    before = present()
    with device_shim():
        inside = present()
        assert all(a is not b for a, b in zip(before, inside, strict=True))
        assert modes() == 1
    assert all(a is b for a, b in zip(before, present(), strict=True))
    assert modes() == 0


def test_nested():
    """The inner one changes nothing, neither when it begins nor when it ends."""
    before = present()
    with device_shim():
        inside = [getattr(owner, name) for owner, name, _ in patches()]
        with device_shim():
            assert [getattr(owner, name) for owner, name, _ in patches()] == inside and modes() == 1
        assert [getattr(owner, name) for owner, name, _ in patches()] == inside and modes() == 1
    assert all(a is b for a, b in zip(before, present(), strict=True))


def test_an_error_leaves_nothing_behind():
    before = present()
    with pytest.raises(ZeroDivisionError), device_shim():
        raise ZeroDivisionError
    assert all(a is b for a, b in zip(before, present(), strict=True)) and modes() == 0
    with device_shim():  # and the next one works
        assert torch.zeros(1, device="cuda").device.type == "cpu"


def test_with_cuda_it_does_nothing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = present()
    with device_shim():
        assert all(a is b for a, b in zip(before, present(), strict=True)) and modes() == 0


# --- what it makes of Megatron-Core's calls -----------------------------------------------------------------------------


def test_devices():
    x = torch.ones(2)
    with device_shim():
        device = torch.cuda.current_device()
        made = [
            torch.zeros(2, device="cuda"), torch.empty(2, device=torch.device("cuda", 0)), torch.tensor([1.0], device="cuda:0"),
            torch.zeros(2, device=device), x.cuda(), x.to("cuda"), x.to(device="cuda"), torch.zeros_like(x, device="cuda"),
            torch.empty(2, pin_memory=True),
        ]  # fmt: skip
        assert {tensor.device.type for tensor in made} == {"cpu"}
        assert x.cuda() is x
        assert x.type() == "torch.cuda.FloatTensor"  # mcore's optimizers look for these names
        assert x.bfloat16().type() == "torch.cuda.BFloat16Tensor"
        assert x.type(torch.float64).dtype == torch.float64
    assert x.type() == "torch.FloatTensor"


def test_streams_and_events():
    with device_shim():
        side, present_stream = torch.cuda.Stream(), torch.cuda.current_stream()
        side.wait_stream(present_stream)
        event = torch.cuda.Event(enable_timing=False)
        event.record(side)
        present_stream.wait_event(event)
        with torch.cuda.stream(side):
            x = torch.ones(1)
        x.record_stream(side)
        torch.cuda.synchronize()
        assert event.query()


def test_generator_states_are_the_cpus():
    with device_shim():
        state = torch.cuda.get_rng_state()
    assert torch.equal(state, torch.get_rng_state())


def test_split_sizes_become_numbers():
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    sizes = torch.tensor([1, 2])
    with device_shim():
        moved = token_dispatcher.maybe_move_tensor_to_cpu(sizes, as_numpy=True)
        assert moved.tolist() == [1, 2] and not torch.is_tensor(moved)
        assert token_dispatcher.maybe_move_tensor_to_cpu(sizes) is sizes
        assert token_dispatcher.maybe_move_tensor_to_cpu(None, as_numpy=True) is None


def test_other_modes_still_see_calls():
    seen = []

    class Noting(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with device_shim(), Noting():
        assert torch.zeros(1, device="cuda").device.type == "cpu"
    assert torch.zeros in seen


def test_the_router_has_its_name():
    import megatron.core.transformer.moe.moe_utils as moe_utils

    with device_shim():
        assert "te_general_gemm" in vars(moe_utils)
    assert shim._depth == 0
