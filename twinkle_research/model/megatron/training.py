"""From gradients to updates on Megatron-Core: windows, schedule, metrics and refusals are those of every backend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn

from twinkle_research.errors import ConfigError
from twinkle_research.model.megatron.gradients import MeshGradients, MeshLayout
from twinkle_research.model.megatron.optimizer import MeshOptimizer
from twinkle_research.model.optimizer import OptimizerSpec
from twinkle_research.model.training import TrainingState

if TYPE_CHECKING:
    from twinkle_research.model.megatron.build import PolicyModel
    from twinkle_research.model.megatron.mesh import Mesh


class MeshTrainingState(TrainingState):
    """``parameters``: name in memory -> what is trained in the ``chunks`` of this process; none on a process that has nothing
    of it. Everything here is collective."""

    gradients: MeshGradients
    optimizer: MeshOptimizer | None
    layout: MeshLayout

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        mesh: Mesh,
        chunks: list[PolicyModel],
        gradient_accumulation_steps: int = 1,
    ) -> None:
        self.mesh = mesh
        self.chunks = chunks
        super().__init__(parameters, mesh.shares, gradient_accumulation_steps=gradient_accumulation_steps, layout=MeshLayout())

    def _new_gradients(self) -> MeshGradients:
        gradients = MeshGradients(self.parameters, self.mesh, self.chunks)
        self.layout.gradients = gradients
        return gradients

    def _new_optimizer(self, spec: OptimizerSpec) -> MeshOptimizer:
        return MeshOptimizer(self.parameters, spec, self.gradients)

    def _reduce(self, norm_type: float) -> None:
        if norm_type != 2:
            raise ConfigError(f"norm_type={norm_type}: backend=megatron clips by the norm of type 2 only")
        self._optimizer()  # which takes the norm
        super()._reduce(norm_type)

    def _norm(self, norm_type: float) -> float:
        return self._optimizer().norm()

    def _update(self, multiplier: float) -> None:
        self._optimizer().step(multiplier)
        self.gradients.updated()
