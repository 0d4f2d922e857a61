"""Updates, master weights, decay groups and state of the optimizer."""

import pytest
import torch
from tiny_models import relative_distance
from torch import nn

from twinkle_research.distributed.runtime import Runtime
from twinkle_research.errors import CheckpointError, ConfigError, UserError
from twinkle_research.model.gradients import Gradients
from twinkle_research.model.muon import orthogonalized
from twinkle_research.model.optimizer import Optimizer, optimizer_spec
from twinkle_research.model.training import TrainingState
from twinkle_research.trainer.config import AdamConfig, MuonConfig, SgdConfig


def one_weight(spec, value=0.0):
    w = nn.Parameter(torch.tensor([value]))
    return w, Optimizer({"w": w}, spec)


def give(optimizer, *gradients):
    for g in gradients:
        optimizer.step({"w": torch.tensor([float(g)])})


def saved(optimizer):
    return {slot: tensor.clone() for _, slot, tensor in optimizer.state()}, optimizer.steps_done


ADAMW = optimizer_spec(AdamConfig(name="adamw", lr=0.1))


def load(optimizer, state, steps):
    optimizer.start_load({"w": list(state)}, steps)
    for slot, tensor in state.items():
        optimizer.load("w", slot, tensor)


def test_s22_moments_are_restored_or_cold():
    w, optimizer = one_weight(ADAMW)
    give(optimizer, 1, 1, 1)
    state, steps = saved(optimizer)
    weights = w.item()
    give(optimizer, -1)
    assert w.item() == pytest.approx(-0.34184, abs=2e-5)

    warm, again = one_weight(ADAMW, weights)
    load(again, state, steps)
    give(again, -1)
    assert torch.equal(warm, w)

    cold, fresh = one_weight(ADAMW, weights)
    give(fresh, -1)
    assert cold.item() == pytest.approx(-0.2, abs=1e-5)


def test_state_of_another_optimizer_is_refused():
    _, optimizer = one_weight(ADAMW)
    give(optimizer, 1)
    state, steps = saved(optimizer)
    _, sgd = one_weight(optimizer_spec("SGD", lr=0.1, momentum=0.9))
    with pytest.raises(CheckpointError, match="written by another optimizer"):
        load(sgd, state, steps)
    with pytest.raises(CheckpointError, match="needs"):
        load(one_weight(ADAMW)[1], {}, steps)
    with pytest.raises(CheckpointError, match="shape"):
        load(one_weight(ADAMW)[1], {k: v.repeat(2) for k, v in state.items()}, steps)


@pytest.mark.parametrize(
    "spec", [ADAMW, optimizer_spec("adam", lr=0.1, weight_decay=0.1), optimizer_spec("sgd", lr=0.1, momentum=0.9, nesterov=True)]
)
def test_same_as_torchs_plain_implementation(spec):
    w, optimizer = one_weight(spec, 0.5)
    other = nn.Parameter(torch.tensor([0.5]))
    options = dict(spec.options) | {"weight_decay": 0.0}  # one dimension: not decayed here
    torchs = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}[spec.kind](
        [other], foreach=False, **options
    )
    for g in (1.0, -0.5, 2.0, 0.25):
        give(optimizer, g)
        other.grad = torch.tensor([g])
        torchs.step()
    assert torch.allclose(w, other, rtol=1e-6)


def test_weight_decay_spares_norms_and_biases():
    parameters = {"matrix": nn.Parameter(torch.ones(2, 2)), "norm": nn.Parameter(torch.ones(2))}
    optimizer = Optimizer(parameters, optimizer_spec("AdamW", lr=0.1, weight_decay=0.5))
    optimizer.step({name: torch.zeros_like(p) for name, p in parameters.items()})
    assert torch.allclose(parameters["matrix"], torch.full((2, 2), 0.95))
    assert torch.equal(parameters["norm"], torch.ones(2))


def test_bfloat16_weights_follow_float32_masters():
    """Steps far below bfloat16's spacing add up instead of vanishing."""
    low = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    high = nn.Parameter(torch.ones(4))
    spec = optimizer_spec("sgd", lr=1e-4)
    optimizers = {"low": Optimizer({"w": low}, spec), "high": Optimizer({"w": high}, spec)}
    for _ in range(60):
        for optimizer in optimizers.values():
            optimizer.step({"w": torch.ones(4)})
    assert torch.equal(low, high.to(torch.bfloat16))
    assert not torch.equal(low, torch.ones(4, dtype=torch.bfloat16))
    assert optimizers["low"].slots("w") == ["master"] and optimizers["high"].slots("w") == []

    state, steps = saved(optimizers["low"])
    other = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    loaded = Optimizer({"w": other}, spec)
    load(loaded, state, steps)
    assert torch.equal(other, low) and torch.equal(loaded.masters["w"], optimizers["low"].masters["w"])


def test_bfloat16_gradients_accumulate_in_float32():
    w = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    gradients = Gradients({"w": w})
    for _ in range(1000):  # a bfloat16 sum would stop at 256
        (w.sum()).backward()
    assert torch.equal(gradients.tensors()["w"], torch.full((3,), 1000.0))
    assert w.grad is None
    gradients.close()
    w.sum().backward()
    assert w.grad is not None


def test_muon_takes_matrices_and_leaves_the_rest_to_adamw():
    torch.manual_seed(0)
    parameters = {
        "hidden": nn.Parameter(torch.randn(6, 4)),
        "embedding": nn.Parameter(torch.randn(8, 4)),
        "norm": nn.Parameter(torch.ones(4)),
    }
    spec = optimizer_spec(MuonConfig(lr=0.02, adamw_lr=0.01))
    optimizer = Optimizer(parameters, spec, ["hidden"])
    before = {name: p.detach().clone() for name, p in parameters.items()}
    gradients = {name: torch.randn_like(p) for name, p in parameters.items()}
    optimizer.step(gradients, multiplier=0.5)
    assert {name: optimizer.slots(name) for name in parameters} == {
        "hidden": ["momentum"], "embedding": ["exp_avg", "exp_avg_sq"], "norm": ["exp_avg", "exp_avg_sq"],
    }  # fmt: skip
    assert float((parameters["norm"].detach() - before["norm"]).abs().max()) == pytest.approx(
        0.005, rel=1e-3
    )  # Adam's first step: lr
    singular = torch.linalg.svdvals(parameters["hidden"].detach() - before["hidden"])
    assert singular.max() / singular.min() < 2  # orthogonalised

    again = Optimizer({name: nn.Parameter(p.detach().clone()) for name, p in parameters.items()}, spec, ["hidden"])
    again.start_load({name: optimizer.slots(name) for name in parameters}, optimizer.steps_done)
    for name in parameters:
        for slot in optimizer.slots(name):
            again.load(name, slot, optimizer.tensor(name, slot))
    for o in (optimizer, again):
        o.step(gradients)
    assert all(torch.equal(again.parameters[name], p) for name, p in parameters.items())


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5), (1, 7)])
def test_muon_is_torchs_in_the_precision_of_the_model(shape):
    """Computed in bfloat16 it has the same bits; in float32 it is what bfloat16 rounds."""
    torch.manual_seed(0)
    start, gradients = torch.randn(shape), [torch.randn(shape) for _ in range(3)]
    options = {"lr": 0.02, "momentum": 0.9, "nesterov": True, "ns_steps": 5, "weight_decay": 0.1}

    def stepped(parameter):
        optimizer = Optimizer({"w": parameter}, optimizer_spec("Muon", **options), ["w"])
        for gradient in gradients:
            optimizer.step({"w": gradient.to(optimizer.masters["w"])})
        return optimizer.masters["w"].detach()

    theirs = nn.Parameter(start.bfloat16().float())
    optimizer = torch.optim.Muon([theirs], **options)
    for gradient in gradients:
        theirs.grad = gradient
        optimizer.step()
    ours, wide = stepped(nn.Parameter(start.bfloat16())), stepped(nn.Parameter(start.bfloat16().float()))
    assert torch.equal(ours, theirs.detach()) and 0 < relative_distance({"w": wide - start}, {"w": ours - start}) < 0.02
    exact = stepped(nn.Parameter(start.bfloat16().double()))
    assert exact.dtype == torch.float64 and torch.allclose(exact.float(), wide, atol=1e-5)


def test_orthogonalized():
    torch.manual_seed(0)
    matrix = torch.randn(12, 7, dtype=torch.float64)
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    found = orthogonalized(matrix, 5, torch.float64)
    inner = u.T @ found @ v.T  # diagonal: singular vectors stay
    assert torch.allclose(inner, torch.diag(inner.diagonal()), atol=1e-12)
    assert float(inner.diagonal().min()) > 0.6 and float(inner.diagonal().max()) < 1.3
    assert torch.allclose(orthogonalized(matrix.T, 5, torch.float64), found.T)
    assert torch.equal(orthogonalized(3 * matrix, 0, torch.float64), 3 * matrix / (3 * matrix).norm())
    assert torch.equal(orthogonalized(torch.zeros(2, 3), 5, torch.float32), torch.zeros(2, 3))


def test_muon_without_momentum_keeps_none_and_resumes():
    w = nn.Parameter(torch.ones(2, 2))
    optimizer = Optimizer({"w": w}, optimizer_spec("Muon", momentum=0.0, nesterov=False), ["w"])
    optimizer.step({"w": torch.ones(2, 2)})
    assert optimizer.slots("w") == optimizer.expected_slots("w") == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("adamww",), "did you mean 'adamw'"),
        (("AdamW", {"learning_rate": 1}), "has no option 'learning_rate'"),
        (("AdamW", {"betas": [0.9, 1.0]}), "betas"),
        (("AdamW", {"lr": float("nan")}), "lr must be finite"),
        (("sgd", {"betas": [0.9, 0.9]}), "has no option 'betas'"),
    ],
)
def test_refused(arguments, message):
    name, options = (*arguments, {})[:2]
    with pytest.raises(ConfigError, match=message):
        optimizer_spec(name, **options)


def test_names_and_classes():
    assert optimizer_spec(torch.optim.AdamW, lr=1.0).kind == optimizer_spec("default").kind == "adamw"
    assert optimizer_spec(SgdConfig(lr=0.5, momentum=0.9)).options["momentum"] == 0.9
    assert optimizer_spec(ADAMW) is ADAMW


# --- the accumulation window --------------------------------------------------------------------------------------------


def state_of(lr=0.1, steps=1, value=1.0):
    w = nn.Parameter(torch.tensor([value]))
    state = TrainingState({"w": w}, Runtime(), gradient_accumulation_steps=steps)
    state.set_optimizer(optimizer_spec("sgd", lr=lr))
    return w, state


def call(w, state, gradient, count=1):
    state.open(None)
    (w * gradient).sum().backward()
    state.record(count, [], False)
    state.clip_grad_and_step(None)


def test_s01_tail_window():
    w, state = state_of(steps=4)
    for gradient in (4, 4, 4, 4, 2, 6):
        call(w, state, gradient)
    assert w.item() == pytest.approx(0.6) and state.cur_step == 6 and state.optimizer.steps_done == 1
    state.finish_window(None)
    assert w.item() == pytest.approx(0.2, abs=1e-7)
    state.finish_window(None)  # nothing is open
    assert state.optimizer.steps_done == 2 and state.schedule_position == 2


def test_zero_grad_inside_a_window_keeps_what_is_to_be_applied():
    w, state = state_of(steps=2)
    for gradient in (1, 3):
        state.open(None)
        (w * gradient).sum().backward()
        state.record(1, [], False)
        state.clip_grad_norm(None)
        state.step()
        state.zero_grad()
        state.lr_step()
    assert w.item() == pytest.approx(1 - 0.1 * 2) and w.grad is None and state.schedule_position == 1


def test_clipping_is_torchs():
    w, state = state_of()
    state.open(1.0)
    (w * 8).sum().backward()
    assert state.clip_grad_norm(2.0) == pytest.approx(8.0)
    assert w.grad.item() == pytest.approx(2.0)
    state.step()
    assert w.item() == pytest.approx(1 - 0.1 * 2)
    assert state.meters[True].calculate(lambda x: [x])["grad_norm"] == pytest.approx(8.0)


def test_misuse_is_named():
    w, state = state_of()
    state.open(1.0)
    with pytest.raises(UserError, match="normalizer was passed to some"):
        state.open(None)
    with pytest.raises(UserError, match="set_optimizer"):
        TrainingState({"w": w}, Runtime()).clip_grad_and_step(1.0)
    for spec in (optimizer_spec("sgd", nesterov=True), optimizer_spec("muon", momentum=0.0)):
        with pytest.raises(ConfigError, match="nesterov"):
            state.set_optimizer(spec)
    with pytest.raises(ConfigError, match="gradient_accumulation_steps"):
        TrainingState({"w": w}, Runtime(), gradient_accumulation_steps=0)
