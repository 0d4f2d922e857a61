"""The sampler that the config group ``sampler`` asks for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from twinkle_research.model.facts import read_facts
from twinkle_research.sampler.base import Sampler
from twinkle_research.sampler.choice import chosen_sampler
from twinkle_research.sampler.config import TransformersSamplerConfig, vllm_config

if TYPE_CHECKING:
    from twinkle_research.distributed.runtime import Runtime
    from twinkle_research.model.base import TwinkleModel
    from twinkle_research.template.base import Template
    from twinkle_research.trainer.config import TrainConfig


def build_sampler(cfg: TrainConfig, model: TwinkleModel, template: Template, folder: Path, runtime: Runtime) -> Sampler:
    """Collective. ``folder``: the model's Hugging Face folder. Close the sampler before the process group."""
    choice = chosen_sampler(cfg.sampler, read_facts(folder), runtime.device.type == "cpu")
    if choice.name == "vllm":
        from twinkle_research.sampler.vllm import VLLMSampler

        return VLLMSampler.from_config(vllm_config(cfg.sampler), folder, template, runtime, model=cfg.model, adapter=cfg.adapter)
    from twinkle_research.sampler.policy import PolicySampler

    max_rows = cfg.sampler.max_rows if cfg.sampler.name == "transformers" else TransformersSamplerConfig().max_rows
    return PolicySampler(model, template, runtime, max_rows=max_rows)
