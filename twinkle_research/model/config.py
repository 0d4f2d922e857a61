"""Config of the model, the backend that runs it and the adapter trained on it."""

from dataclasses import dataclass, field
from enum import Enum
from typing import List, Optional

from omegaconf import MISSING


class DType(Enum):
    float32 = "float32"
    bfloat16 = "bfloat16"


class Attention(Enum):
    auto = "auto"  # flash attention on a GPU where it is installed, else sdpa
    sdpa = "sdpa"
    flash = "flash"
    eager = "eager"


class ModelSource(Enum):
    tiny = "tiny"
    tiny_sums = "tiny_sums"
    smollm2_135m = "smollm2_135m"


@dataclass
class ArchitectureConfig:
    """Facts about a shipped model, so that the run plan needs no prepared folder."""

    model_type: str = MISSING
    vocab_size: int = 0
    hidden_size: int = 0
    intermediate_size: int = 0
    num_layers: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    max_positions: int = 0
    tied_embeddings: bool = True
    qk_norm: bool = False
    # Of a mixture of experts, all of whose layers are mixtures.
    num_experts: int = 0
    experts_per_token: int = 0
    expert_intermediate_size: int = 0


@dataclass
class ModelConfig:
    name: str = MISSING
    # Folder or hub id. Set alone, it replaces the source of the chosen option.
    path: Optional[str] = None
    revision: Optional[str] = None
    # What the option stands for: one that is prepared here, or one of the hub.
    source: Optional[ModelSource] = None
    hub_id: Optional[str] = None
    architecture: Optional[ArchitectureConfig] = None
    # Dtype of the weights in memory. bfloat16 keeps float32 master weights in the optimizer.
    dtype: DType = DType.float32
    attention: Attention = Attention.auto
    trust_remote_code: bool = False


class Sharding(Enum):
    auto = "auto"  # none for one process, ddp for several
    none = "none"
    ddp = "ddp"  # each process has the whole model
    fsdp2 = "fsdp2"  # each process keeps a part of every weight, gradient and optimizer state


class Device(Enum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


@dataclass
class TransformersBackendConfig:
    name: str = "transformers"
    device: Device = Device.auto
    sharding: Sharding = Sharding.auto
    gradient_checkpointing: bool = False
    # Trained positions whose logits exist at one time; bounds the memory of the vocabulary projection.
    logits_chunk: int = 512


@dataclass
class NoAdapterConfig:
    name: str = "none"


@dataclass
class LoraAdapterConfig:
    """LoRA (Hu et al. 2021, arXiv:2106.09685) as in PEFT."""

    name: str = "lora"
    r: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    target_modules: List[str] = field(default_factory=lambda: ["all-linear"])
    modules_to_save: List[str] = field(default_factory=list)
    rslora: bool = False
    dora: bool = False
