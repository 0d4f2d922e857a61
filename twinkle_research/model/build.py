"""The model that a config describes, on the backend that it chooses."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from twinkle_research.model.megatron.config import MegatronBackendConfig

if TYPE_CHECKING:
    from twinkle_research.distributed.runtime import Runtime
    from twinkle_research.model.base import TwinkleModel
    from twinkle_research.trainer.config import TrainConfig


def build_model(cfg: TrainConfig, folder: str | Path, runtime: Runtime) -> TwinkleModel:
    """Weights from ``folder``, the adapter added, the processor set. Collective."""
    if isinstance(cfg.backend, MegatronBackendConfig):
        from twinkle_research.model.megatron.model import MegatronModel

        return MegatronModel.from_config(cfg, folder, runtime)
    from twinkle_research.model.transformers.model import TransformersModel

    return TransformersModel.from_config(cfg, folder, runtime)
