"""How a model is spread over processes by Megatron-Core."""

from dataclasses import dataclass
from enum import Enum
from typing import Optional

from twinkle_research.model.config import Device

# Those of config.json's ``model_type`` whose weights have an exact place in Megatron-Core's GPTModel.
MODEL_TYPES = (
    "deepseek_v2", "gemma", "gemma2", "gemma3_text", "granite", "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3",
    "qwen3_moe",
)  # fmt: skip

_DELTA_NET = (
    "Megatron-Core's gated delta net takes no packed rows, and needs flash-linear-attention, whose kernels run on GPUs only"
)
# Why others have none, where that is not what one would expect.
WHY_NOT = dict.fromkeys(("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next"), _DELTA_NET) | {
    "gemma3": "it has a vision tower; the language model alone, of type gemma3_text, is supported",
}


def no_counterpart(model: str, model_type: str) -> str:
    why = WHY_NOT.get(model_type)
    return (
        f"backend=megatron has no exact counterpart of {model}, whose model_type is {model_type}{f' ({why})' if why else ''}; it "
        f"has {', '.join(MODEL_TYPES)}. For another one write backend=transformers"
    )


class Recompute(Enum):
    none = "none"
    selective = "selective"  # the core attention
    full = "full"  # whole layers


@dataclass
class MegatronBackendConfig:
    name: str = "megatron"
    device: Device = Device.auto
    # Processes that share each matrix.
    tensor_parallel: int = 1
    # Processes that each have some of the layers.
    pipeline_parallel: int = 1
    # Chunks of layers that each pipeline stage has (interleaved 1F1B); 1: one stretch of layers.
    virtual_stages: int = 1
    # Processes that share each sequence.
    context_parallel: int = 1
    # Processes that each have some of the experts of a mixture.
    expert_parallel: int = 1
    # Processes that share each expert's matrices. null: as tensor_parallel.
    expert_tensor_parallel: Optional[int] = None
    # Norms and what lies between matrices split along the sequence. null: where tensor_parallel > 1.
    sequence_parallel: Optional[bool] = None
    # Optimizer state and masters split over the data-parallel processes.
    distributed_optimizer: bool = False
    # Sum gradients while the backward pass still runs; gather parameters (distributed_optimizer) while the next one starts.
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    recompute: Recompute = Recompute.none
    # Layers that are recomputed together, with recompute=full.
    recompute_layers: int = 1
    # Kernels of Transformer Engine for attention and norms. null: on a GPU where it is installed.
    transformer_engine: Optional[bool] = None
    # Trained positions whose logits exist at one time; bounds the memory of the vocabulary projection.
    logits_chunk: int = 512


def model_processes(backend: MegatronBackendConfig) -> int:
    """Processes that work on one share of the data together."""
    return backend.tensor_parallel * backend.pipeline_parallel * backend.context_parallel


def expert_processes(backend: MegatronBackendConfig) -> int:
    """Processes that have every layer's experts once, together: Megatron-Core lays experts out beside the rest of the model."""
    return expert_tensor_parallel(backend) * backend.expert_parallel * backend.pipeline_parallel


def expert_tensor_parallel(backend: MegatronBackendConfig) -> int:
    given = backend.expert_tensor_parallel
    return backend.tensor_parallel if given is None else given
