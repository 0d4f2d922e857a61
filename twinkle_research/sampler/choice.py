"""Which sampler a run has. Imports neither torch nor vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from twinkle_research.sampler.config import SamplerConfig
from twinkle_research.sampler.vllm_env import CPU_HEAD_DIMS, vllm_installed

if TYPE_CHECKING:
    from twinkle_research.model.facts import Facts


class Choice(NamedTuple):
    """``name``: vllm or transformers. ``reason``: why, where the config left it open."""

    name: str
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.name} sampler" + (f" ({self.reason})" if self.reason else "")


def chosen_sampler(config: SamplerConfig, facts: Facts | None, on_cpu: bool) -> Choice:
    """What ``config`` comes down to here. ``facts`` of the model, where it is known."""
    if config.name != "auto":
        return Choice(config.name)
    if not vllm_installed():
        return Choice("transformers", "vLLM is not installed")
    obstacle = vllm_obstacle(facts, on_cpu)
    return Choice("transformers", obstacle) if obstacle else Choice("vllm", "vLLM is installed")


def vllm_obstacle(facts: Facts | None, on_cpu: bool) -> str | None:
    """Why vLLM cannot sample the model that trains, as far as its facts tell."""
    if facts is None or not on_cpu:
        return None
    if facts.head_dim not in CPU_HEAD_DIMS:
        return f"on a CPU vLLM has no attention for head_dim {facts.head_dim}"
    if any("experts" in module.split(".") for module in facts.modules):
        return "on a CPU vLLM packs a mixture's experts away, so that new weights would not reach them"
    return None
