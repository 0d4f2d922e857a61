"""torch's optimizers over float32 master weights, with named and streamable state."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from twinkle_research.errors import CheckpointError, ConfigError, nearest
from twinkle_research.model.gradients import is_low_precision
from twinkle_research.model.layout import WHOLE, Layout
from twinkle_research.model.muon import Muon

# torch's name of a state tensor -> its name in a checkpoint
SLOTS = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "momentum_buffer": "momentum"}

# kind -> its options and their defaults (torch's; the learning rate's is Twinkle's)
OPTIONS: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 1e-5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01},
    "adam": {"lr": 1e-5, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
    "sgd": {"lr": 1e-5, "momentum": 0.0, "nesterov": False, "weight_decay": 0.0},
    "muon": {
        "lr": 1e-3, "momentum": 0.95, "nesterov": True, "ns_steps": 5, "weight_decay": 0.0,
        "adamw_lr": 1e-5, "adamw_betas": (0.9, 0.95), "adamw_eps": 1e-8,
    },
}  # fmt: skip
ALIASES = {"default": "adamw", "megatronoptimizer": "adamw"}


@dataclass(frozen=True)
class OptimizerSpec:
    kind: str
    options: dict[str, Any]

    def describe(self) -> dict[str, Any]:
        return {"name": self.kind, **self.options}

    @property
    def lr(self) -> float:
        return self.options["lr"]


def optimizer_spec(optimizer: Any, **options: Any) -> OptimizerSpec:
    """From an optimizer config, a name ("AdamW", "adam", "default") or a class of torch.optim of that name.

    Raises ConfigError for an unknown name, option or an impossible value.
    """
    if options and is_dataclass(optimizer):
        raise ConfigError(f"options {', '.join(options)} would have no effect on an optimizer config that is ready")
    if isinstance(optimizer, OptimizerSpec):
        return optimizer
    if not isinstance(optimizer, str | type) and not is_dataclass(optimizer):
        raise ConfigError(f"an optimizer is a name or a class of torch.optim, got an object of type {type(optimizer).__name__}")
    if is_dataclass(optimizer):
        options = {key: value for key, value in asdict(optimizer).items() if key != "name"}
        optimizer = optimizer.name
    name = optimizer if isinstance(optimizer, str) else optimizer.__name__
    kind = ALIASES.get(name.lower(), name.lower())
    if kind not in OPTIONS:
        raise ConfigError(f"unknown optimizer {name!r}; {nearest(name.lower(), [*OPTIONS, *ALIASES])}")
    for option in options:
        if option not in OPTIONS[kind]:
            raise ConfigError(f"optimizer {kind} has no option {option!r}; {nearest(option, OPTIONS[kind])}")
    values = OPTIONS[kind] | options
    for option in ("betas", "adamw_betas"):
        if option in values:
            values[option] = _check_betas(option, values[option])
    for option in ("lr", "adamw_lr", "eps", "adamw_eps", "weight_decay", "momentum"):
        if option in values and not 0.0 <= float(values[option]) < float("inf"):
            raise ConfigError(f"optimizer.{option} must be finite and >= 0, got {values[option]}")
    return OptimizerSpec(kind, values)


def _check_betas(option: str, betas: Iterable[float]) -> tuple[float, float]:
    betas = tuple(float(beta) for beta in betas)
    if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
        raise ConfigError(f"optimizer.{option} must be two numbers in [0, 1), got {list(betas)}")
    return betas


class OptimizerState(ABC):
    """What a checkpoint holds of an optimizer: for each parameter some slots, tensors of its shape."""

    spec: OptimizerSpec
    parameters: dict[str, nn.Parameter]
    steps_done: int

    @abstractmethod
    def slots(self, name: str) -> list[str]:
        """Names of the checkpoint tensors that belong to parameter ``name`` now."""

    @abstractmethod
    def expected_slots(self, name: str) -> list[str]:
        """The slots that a state saved after at least one step has for ``name`` under this optimizer."""

    @abstractmethod
    def tensor(self, name: str, slot: str) -> Tensor: ...

    @abstractmethod
    def start_load(self, slots: Mapping[str, Collection[str]], steps_done: int) -> None:
        """Before ``load``: the slots of each parameter that are to come. Raises as ``check_load``, with nothing changed."""

    @abstractmethod
    def load(self, name: str, slot: str, tensor: Tensor) -> None:
        """Puts one tensor of the state back, copying it. Raises CheckpointError where its shape is wrong."""

    def state(self) -> Iterator[tuple[str, str, Tensor]]:
        """(parameter name, slot, tensor) of everything but ``steps_done``."""
        for name in self.parameters:
            for slot in self.slots(name):
                yield name, slot, self.tensor(name, slot)

    def check_load(self, slots: Mapping[str, Collection[str]], steps_done: int) -> None:
        """Raises CheckpointError where a slot of a parameter is missing or unknown."""
        for name, found in slots.items():
            expected = self.expected_slots(name) if steps_done else [s for s in self.expected_slots(name) if s == "master"]
            if set(found) != set(expected):
                raise CheckpointError(
                    f"the optimizer state of {name} has {sorted(found) or 'nothing'}, but {self.spec.kind} needs "
                    f"{sorted(expected)}: it was written by another optimizer, or by one with other settings. Use that one, or "
                    "load the weights alone"
                )

    def _check_shape(self, name: str, slot: str, tensor: Tensor) -> None:
        parameter = self.parameters[name]
        if tensor.shape != parameter.shape:
            raise CheckpointError(f"{name}.{slot} has shape {tuple(tensor.shape)}, the parameter {tuple(parameter.shape)}")


class Optimizer(OptimizerState):
    """Updates named parameters from named gradients.

    A bfloat16 or float16 parameter has a float32 master, which takes the updates; the parameter is its rounded copy.
    Weight decay applies to tensors of two or more dimensions only, so not to norms and biases.
    ``hidden_matrices``: names of the parameters that Muon orthogonalises; it uses AdamW for the others.
    ``layout``: parameters are this rank's parts where it shards; a part that is computed in lower precision is its own
    master.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        spec: OptimizerSpec,
        hidden_matrices: Iterable[str] = (),
        layout: Layout = WHOLE,
    ) -> None:
        self.spec = spec
        self.parameters = dict(parameters)
        self.masters: dict[str, nn.Parameter] = {
            name: nn.Parameter(p.detach().float()) if is_low_precision(p) else p for name, p in self.parameters.items()
        }
        self._with_master = {
            name for name, p in self.parameters.items() if self.masters[name] is not p or layout.dtype(name, p) != p.dtype
        }
        if spec.kind == "muon" and any(layout.is_sharded(name) for name in self.parameters):
            raise ConfigError("optimizer=muon needs whole matrices, but backend.sharding=fsdp2 cuts them; use ddp, or adamw")
        self.steps_done = 0
        self._parts = self._build(frozenset(hidden_matrices))
        self._part_of = {id(p): part for part in self._parts for group in part.param_groups for p in group["params"]}

    def _build(self, hidden_matrices: frozenset[str]) -> list[torch.optim.Optimizer]:
        o = self.spec.options
        masters = self.masters
        if self.spec.kind != "muon":
            classes = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}
            keyword = {key: value for key, value in o.items() if key not in ("lr", "weight_decay")}
            return [classes[self.spec.kind](_decay_groups(masters.values(), o["lr"], o["weight_decay"]), fused=True, **keyword)]
        matrices = [name for name in masters if name in hidden_matrices]
        others = [p for name, p in masters.items() if name not in hidden_matrices]
        parts: list[torch.optim.Optimizer] = []
        if matrices:
            keyword = {key: o[key] for key in ("momentum", "nesterov", "ns_steps")}
            parts.append(Muon(self._matrix_groups(matrices), **keyword))
        if others:
            groups = _decay_groups(others, o["adamw_lr"], o["weight_decay"])
            parts.append(torch.optim.AdamW(groups, betas=o["adamw_betas"], eps=o["adamw_eps"], fused=True))
        return parts

    def _matrix_groups(self, names: Iterable[str]) -> list[dict[str, Any]]:
        """Groups of Muon: a matrix is orthogonalised in the precision that the model computes in, which its gradient has."""
        found: dict[torch.dtype, list[nn.Parameter]] = {}
        for name in names:
            low = is_low_precision(self.parameters[name])
            found.setdefault(torch.bfloat16 if low else self.parameters[name].dtype, []).append(self.masters[name])
        lr, decay = self.spec.lr, self.spec.options["weight_decay"]
        return [group | {"dtype": dtype} for dtype, ps in found.items() for group in _decay_groups(ps, lr, decay)]

    def step(self, gradients: Mapping[str, Tensor], multiplier: float = 1.0) -> None:
        """One update at ``multiplier`` times the peak learning rate."""
        for name, master in self.masters.items():
            master.grad = gradients[name]
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = group["peak_lr"] * multiplier
            part.step()
        self.steps_done += 1
        for name, master in self.masters.items():
            if master is not self.parameters[name]:
                master.grad = None
        self._round_masters()

    def _round_masters(self) -> None:
        low = [name for name, master in self.masters.items() if master is not self.parameters[name]]
        if low:
            with torch.no_grad():
                torch._foreach_copy_([self.parameters[name] for name in low], [self.masters[name] for name in low])

    # --- state --------------------------------------------------------------------------------------------------

    def slots(self, name: str) -> list[str]:
        master = self.masters[name]
        slots = ["master"] if name in self._with_master else []
        state = self._part_of[id(master)].state.get(master, {})
        return slots + [SLOTS[key] for key in SLOTS if isinstance(state.get(key), Tensor)]

    def tensor(self, name: str, slot: str) -> Tensor:
        master = self.masters[name]
        if slot == "master":
            return master.detach()
        return self._part_of[id(master)].state[master][torch_key(slot)]

    def expected_slots(self, name: str) -> list[str]:
        master = self.masters[name]
        part = self._part_of[id(master)]
        slots = ["master"] if name in self._with_master else []
        if isinstance(part, (torch.optim.AdamW, torch.optim.Adam)):
            return [*slots, "exp_avg", "exp_avg_sq"]
        return [*slots, "momentum"] if part.param_groups[0].get("momentum") else slots

    def start_load(self, slots: Mapping[str, Collection[str]], steps_done: int) -> None:
        self.check_load(slots, steps_done)
        for part in self._parts:
            part.state.clear()
        self.steps_done = steps_done

    @torch.no_grad()
    def load(self, name: str, slot: str, tensor: Tensor) -> None:
        self._check_shape(name, slot, tensor)
        master = self.masters[name]
        if slot == "master":
            master.copy_(tensor)
            if master is not self.parameters[name]:
                self.parameters[name].copy_(master)
            return
        state = self._part_of[id(master)].state[master]
        state[torch_key(slot)] = tensor.to(master, copy=True)
        if slot == "exp_avg":
            # torch keeps the count of a fused optimizer beside the parameter
            state["step"] = torch.tensor(float(self.steps_done), dtype=torch.float32, device=master.device)


def torch_key(slot: str) -> str:
    """torch's name for a slot of a checkpoint."""
    return next(key for key, name in SLOTS.items() if name == slot)


def _decay_groups(parameters: Iterable[nn.Parameter], lr: float, weight_decay: float) -> list[dict[str, Any]]:
    """One group with and one without weight decay; ``peak_lr`` is what schedules multiply."""
    parameters = list(parameters)
    decayed = [p for p in parameters if p.ndim >= 2]
    others = [p for p in parameters if p.ndim < 2]
    groups = [(decayed, weight_decay), (others, 0.0)]
    return [{"params": ps, "lr": lr, "peak_lr": lr, "weight_decay": wd} for ps, wd in groups if ps]
