"""How many parameters a process holds, exactly, in the layouts of backend=megatron, and how many an adapter adds."""

from __future__ import annotations

from dataclasses import dataclass

from twinkle_research.model.config import LoraAdapterConfig, NoAdapterConfig
from twinkle_research.model.facts import ALL_LINEAR, Facts
from twinkle_research.model.megatron.config import MegatronBackendConfig, expert_tensor_parallel

# Those of config.json's ``model_type`` whose tensors follow from their dimensions (others have parts of their own).
KNOWN = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
COLUMN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")  # cut along their outputs under tensor parallelism
ROW = ("o_proj", "down_proj")  # along their inputs


@dataclass(frozen=True)
class Held:
    """Parameters of one process. ``dense`` are those of all but ``experts``."""

    dense: int
    experts: int

    @property
    def both(self) -> int:
        return self.dense + self.experts


@dataclass(frozen=True)
class Widths:
    """Of a model's matrices: queries, keys (and values, each), MLP, one expert; hidden states, one head."""

    query: int
    key: int
    mlp: int
    expert: int
    hidden: int
    head: int

    @classmethod
    def of(cls, facts: Facts) -> Widths:
        return cls(
            facts.num_heads * facts.head_dim, facts.num_kv_heads * facts.head_dim, facts.intermediate_size,
            facts.expert_intermediate_size, facts.hidden_size, facts.head_dim,
        )  # fmt: skip


def is_known(facts: Facts) -> bool:
    """Whether the model's tensors follow from its dimensions."""
    return facts.model_type in KNOWN


def has_qk_norm(facts: Facts) -> bool:
    return facts.model_type in ("qwen3", "qwen3_moe")


def mixture_layers(facts: Facts) -> int:
    """How many layers are mixtures of experts."""
    each = 3 * facts.num_experts * facts.expert_intermediate_size * facts.hidden_size
    return facts.expert_parameters // each if each else 0


def held_by_megatron(facts: Facts, backend: MegatronBackendConfig, stage: int) -> Held:
    """By a process of a pipeline stage. Exact where all layers are of one kind, else that of the stage with most mixtures."""
    w, tensor, stages = Widths.of(facts), backend.tensor_parallel, backend.pipeline_parallel
    layers = facts.num_layers // stages
    mixtures = min(layers, mixture_layers(facts))
    whole = 2 * w.hidden + (2 * w.head if has_qk_norm(facts) else 0)  # norms of a layer, on each tensor-parallel process
    cut = (2 * w.query + 2 * w.key) * w.hidden + (w.query + 2 * w.key if facts.model_type == "qwen2" else 0)
    dense = layers * (whole + cut // tensor) + (layers - mixtures) * 3 * w.mlp * w.hidden // tensor
    dense += mixtures * facts.num_experts * w.hidden  # routers
    vocabulary = -(-facts.vocab_size // tensor) * w.hidden
    ends = (stage == 0) + (stage == stages - 1)
    if stages == 1 and facts.tied_embeddings:
        ends = 1
    dense += vocabulary * ends + (w.hidden if stage == stages - 1 else 0)
    local = facts.num_experts // backend.expert_parallel
    experts = mixtures * local * 3 * w.expert * w.hidden // expert_tensor_parallel(backend)
    return Held(dense, experts)


# --- adapters -------------------------------------------------------------------------------------------------------


def adapted(adapter: LoraAdapterConfig, facts: Facts) -> dict[str, int]:
    """Last name of each kind of matrix with a LoRA -> number of layers that have one."""
    targets = facts.linear_modules if ALL_LINEAR in adapter.target_modules else adapter.target_modules
    found: dict[str, int] = {}
    paths: set[str] = set()
    for target in targets:
        if "." in target:
            paths.update(name for name in facts.matching(target) if "experts" not in name.split("."))
        elif facts.kinds.get(target):
            found[target] = facts.kinds[target]
    for path in paths:
        kind = path.rpartition(".")[2]
        if kind not in targets:
            found[kind] = found.get(kind, 0) + 1
    return found


def matrix(kind: str, facts: Facts) -> tuple[int, int] | None:
    """(outputs, inputs) of a kind of matrix of a layer; None for one that is not there in every model."""
    w = Widths.of(facts)
    return {
        "q_proj": (w.query, w.hidden), "k_proj": (w.key, w.hidden), "v_proj": (w.key, w.hidden), "o_proj": (w.hidden, w.query),
        "gate_proj": (w.mlp, w.hidden), "up_proj": (w.mlp, w.hidden), "down_proj": (w.hidden, w.mlp),
        "lm_head": (facts.vocab_size, w.hidden), "embed_tokens": (w.hidden, facts.vocab_size),
    }.get(kind)  # fmt: skip


def lora_parameters(adapter: LoraAdapterConfig, facts: Facts, tensor: int = 1) -> int:
    """Of all layers, on one of ``tensor`` processes that share each matrix (of a pair of factors one is whole on each)."""
    counts = adapted(adapter, facts)
    if not is_known(facts) or any(matrix(kind, facts) is None for kind in counts):
        trained = sum(adapter.r * (rows + columns) + (rows if adapter.dora else 0) for rows, columns in facts.linear_shapes)
        return trained * sum(counts.values()) // max(1, len(facts.linear_shapes))
    total = 0
    for kind, count in counts.items():
        rows, columns = matrix(kind, facts)
        total += count * (rows if adapter.dora else 0)
        total += count * adapter.r * (rows // (tensor if kind in COLUMN else 1) + columns // (tensor if kind in ROW else 1))
    return total


def trainable_parameters(adapter: NoAdapterConfig | LoraAdapterConfig, facts: Facts) -> int:
    """Of the whole model. Exact for full fine-tuning, for all-linear, and for the layers of the models that are known."""
    return lora_parameters(adapter, facts) if isinstance(adapter, LoraAdapterConfig) else facts.parameters
