"""Megatron-Core's optimizers with named and streamable state."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.optimizer import DistributedOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, MegatronOptimizer
from torch import Tensor, nn

from twinkle_research.errors import ConfigError
from twinkle_research.model.gradients import is_low_precision
from twinkle_research.model.megatron.shim import device_shim
from twinkle_research.model.optimizer import OptimizerSpec, OptimizerState, torch_key

if TYPE_CHECKING:
    from twinkle_research.model.megatron.gradients import MeshGradients

KINDS = ("adamw", "adam", "sgd")


@dataclass(frozen=True)
class _Updated:
    """``master``: what ``optimizer`` updates of a parameter in this process: itself, a float32 copy, or a range of either."""

    optimizer: torch.optim.Optimizer
    master: Tensor


class MeshOptimizer(OptimizerState):
    """Updates ``parameters`` (name -> this process's part) from the sums in ``gradients``.

    Masters, weight decay, names and shapes of the state are those of model.optimizer.Optimizer: a tensor of the state has the
    shape of the parameter, also where the distributed optimizer spreads it over processes. Everything is collective.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], spec: OptimizerSpec, gradients: MeshGradients) -> None:
        _check(spec, gradients.distributed)
        self.spec = spec
        self.parameters = dict(parameters)
        self.steps_done = 0
        # The state that every parameter has after a step, beside its master.
        self._moments = ["exp_avg", "exp_avg_sq"] if spec.kind != "sgd" else ["momentum"] if spec.options["momentum"] else []
        self._ranges = gradients.ranges
        low_precision = gradients.chunks[0].config.params_dtype is torch.bfloat16
        # Without grad, so that ranges of parameters are tensors of their own to torch.
        with device_shim(), gradients.alone(), torch.no_grad():
            self._mcore = get_megatron_optimizer(
                _config(spec, gradients.distributed, low_precision), gradients.wrapped, use_gloo_process_groups=False
            )
        for group in self._mcore.param_groups:
            group["weight_decay"] = spec.options["weight_decay"] * group["wd_mult"]  # 0 for norms and biases
            if "fused" in group:  # of torch's optimizers: one pass over memory, as in model.optimizer
                group["fused"] = True
        self._updated = {parameter: own for part in self._mcore.chained_optimizers for parameter, own in _pairs(part)}

    # --- a step -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def norm(self) -> float:
        """Of the sums over the whole model, each counted once."""
        with device_shim():
            self._mcore.prepare_grads()
            return float(self._mcore.get_grad_norm())

    @torch.no_grad()
    def step(self, multiplier: float = 1.0) -> None:
        """One update at ``multiplier`` times the peak learning rate."""
        for group in self._mcore.param_groups:
            group["lr"] = self.spec.lr * multiplier
        with device_shim():
            self._mcore.prepare_grads()
            self._mcore.step_with_ready_grads()
            self._mcore.zero_grad()  # drops references to the sums, which the next backward pass would add to
        self.steps_done += 1

    # --- state --------------------------------------------------------------------------------------------------

    def slots(self, name: str) -> list[str]:
        return self._slots(name, self.steps_done)

    def expected_slots(self, name: str) -> list[str]:
        return self._slots(name, 1)

    def _slots(self, name: str, steps_done: int) -> list[str]:
        master = ["master"] if is_low_precision(self.parameters[name]) else []
        return master + (self._moments if steps_done else [])

    def tensor(self, name: str, slot: str) -> Tensor:
        """Of the parameter's shape. Collective among the processes that hold the same part of the parameter."""
        parameter = self.parameters[name]
        if parameter not in self._ranges:
            return self._own(parameter, slot)
        own = self._own(parameter, slot) if parameter in self._updated else torch.empty(0, device=parameter.device)
        return self._ranges[parameter].whole(parameter.shape, own)

    def _own(self, parameter: nn.Parameter, slot: str) -> Tensor:
        updated = self._updated[parameter]
        if slot == "master":
            return updated.master.detach()
        return updated.optimizer.state[updated.master][torch_key(slot)]

    def start_load(self, slots: Mapping[str, Collection[str]], steps_done: int) -> None:
        self.check_load(slots, steps_done)
        for optimizer in {id(updated.optimizer): updated.optimizer for updated in self._updated.values()}.values():
            optimizer.state.clear()
            for group in optimizer.param_groups:
                group.pop("step", None)
                if steps_done and not _is_torchs(optimizer):
                    group["step"] = steps_done  # Transformer Engine counts in the group, torch beside each parameter
        self.steps_done = steps_done

    @torch.no_grad()
    def load(self, name: str, slot: str, tensor: Tensor) -> None:
        self._check_shape(name, slot, tensor)
        parameter = self.parameters[name]
        if slot == "master":
            parameter.copy_(tensor)
        if parameter not in self._updated:
            return
        updated = self._updated[parameter]
        if parameter in self._ranges:
            tensor = tensor.reshape(-1)[self._ranges[parameter].own]
        if slot == "master":
            updated.master.copy_(tensor)
            return
        state = updated.optimizer.state[updated.master]
        state[torch_key(slot)] = tensor.to(updated.master, copy=True)
        if slot == "exp_avg" and _is_torchs(updated.optimizer):
            state["step"] = torch.tensor(float(self.steps_done), dtype=torch.float32, device=updated.master.device)


def _check(spec: OptimizerSpec, distributed: bool) -> None:
    if spec.kind not in KINDS:
        raise ConfigError(
            f"optimizer={spec.kind} needs whole matrices, but backend=megatron may cut them; use one of {', '.join(KINDS)}"
        )
    if spec.kind != "sgd":
        return
    if spec.options["nesterov"]:
        raise ConfigError("optimizer.nesterov=true is not supported by backend=megatron; set it to false")
    if distributed:
        raise ConfigError("backend.distributed_optimizer=true needs optimizer=adamw or adam, not sgd")


def _config(spec: OptimizerSpec, distributed: bool, low_precision: bool) -> OptimizerConfig:
    o = spec.options
    kind: dict[str, Any] = {"optimizer": "sgd", "sgd_momentum": o["momentum"]} if spec.kind == "sgd" else {
        "optimizer": "adam", "adam_beta1": o["betas"][0], "adam_beta2": o["betas"][1], "adam_eps": o["eps"],
        "decoupled_weight_decay": spec.kind == "adamw",
    }  # fmt: skip
    return OptimizerConfig(
        lr=spec.lr, weight_decay=o["weight_decay"], bf16=low_precision, use_distributed_optimizer=distributed,
        params_dtype=torch.bfloat16 if low_precision else torch.float32, clip_grad=0.0, **kind,
    )  # fmt: skip


def _pairs(part: MegatronOptimizer) -> Iterable[tuple[nn.Parameter, _Updated]]:
    """Each parameter that this process updates something of, with what it updates."""
    if part.is_stub_optimizer:
        return
    if isinstance(part, DistributedOptimizer):
        groups = [
            (part.model_float16_groups, part.shard_fp32_from_float16_groups),
            (part.model_fp32_groups, part.shard_fp32_groups),
        ]
    elif isinstance(part, Float16OptimizerWithFloat16Params):
        groups = [(part.float16_groups, part.fp32_from_float16_groups), (part.fp32_from_fp32_groups, part.fp32_from_fp32_groups)]
    else:
        own = [group["params"] for group in part.param_groups]
        groups = [(own, own)]
    for of_model, masters in groups:
        for parameters, own in zip(of_model, masters, strict=True):
            for parameter, master in zip(parameters, own, strict=True):
                yield parameter, _Updated(part.optimizer, master)


def _is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    return isinstance(optimizer, torch.optim.Adam | torch.optim.SGD)  # AdamW is an Adam
