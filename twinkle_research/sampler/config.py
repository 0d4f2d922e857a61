"""Config of the samplers."""

from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import List, Optional


@dataclass
class SamplerConfig:
    """What every sampler has: how the rollouts are drawn."""

    name: str = "sampler"
    temperature: float = 1.0
    # Draw from the most likely tokens whose probability reaches this. 1: from all.
    top_p: float = 1.0
    # Draw from the N most likely tokens. null: from all.
    top_k: Optional[int] = None
    # Length limit of a completion, in tokens.
    max_tokens: int = 256
    # Texts that end a completion, beside the model's own end of turn. \n, \t, \r and \\ stand for the characters they name.
    stop: List[str] = field(default_factory=list)


@dataclass
class AutoSamplerConfig(SamplerConfig):
    """vLLM with its default settings where it is installed, else the model itself."""

    name: str = "auto"


@dataclass
class TransformersSamplerConfig(SamplerConfig):
    """The model that is trained samples itself, with a KV cache."""

    name: str = "transformers"
    # Completions in the making at one time on a rank.
    max_rows: int = 128


class EngineDType(Enum):
    auto = "auto"  # that of the model
    float32 = "float32"
    bfloat16 = "bfloat16"


class LoraSync(Enum):
    """How the engine gets a LoRA."""

    merge = "merge"  # added to the weights on the way
    adapter = "adapter"  # as an adapter beside them


class SleepMode(Enum):
    """What becomes of the engine's memory on a GPU while the model trains."""

    auto = "auto"  # level2, or level1 where the weights are not pushed anew (lora=adapter)
    none = "none"  # it stays
    level1 = "level1"  # weights move to the host's memory, the KV cache is dropped
    level2 = "level2"  # both are dropped


@dataclass
class VLLMSamplerConfig(SamplerConfig):
    """A vLLM engine in each process, on the devices that train, which gets the weights after each step."""

    name: str = "vllm"
    dtype: EngineDType = EngineDType.auto
    # Tokens of a prompt and its completion together. null: the model's context.
    max_model_len: Optional[int] = None
    # Completions in the making at one time in an engine.
    max_num_seqs: int = 256
    # Processes that share an engine and its weights: they divide those of a machine, or are those of several whole machines.
    tensor_parallel: int = 1
    # Share of a GPU's memory that the engine takes, weights included.
    gpu_memory_utilization: float = 0.3
    # Size of the KV cache. null: on a GPU what gpu_memory_utilization leaves, on a CPU what its completions need, up to 1.
    kv_cache_gib: Optional[float] = None
    # No CUDA graphs.
    enforce_eager: bool = False
    sleep: SleepMode = SleepMode.auto
    lora: LoraSync = LoraSync.merge
    # After each push compare checksums of all weights, and log-probabilities of a short text, with the trainer's.
    canary: bool = True


def vllm_config(config: SamplerConfig) -> VLLMSamplerConfig:
    """That of sampler=vllm, and for sampler=auto the same with its defaults."""
    return config if isinstance(config, VLLMSamplerConfig) else VLLMSamplerConfig(**asdict(config) | {"name": "vllm"})
