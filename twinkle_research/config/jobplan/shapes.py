"""How many parameters a process holds, exactly, in the layouts of backend=megatron, and how many an adapter adds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from twinkle_research.model.config import LoraAdapterConfig, NoAdapterConfig
from twinkle_research.model.facts import ALL_LINEAR, COLUMN, ROW, Facts, is_embedding, layer_of
from twinkle_research.model.megatron.config import MegatronBackendConfig, expert_tensor_parallel


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
    """Of a model's matrices: all queries, keys, values, what attention gives; MLP, one expert, the shared one; hidden states,
    a head's query and what of it is rotated. With latent attention each head has a key and a value of its own."""

    query: int
    key: int
    value: int
    output: int
    mlp: int
    expert: int
    shared: int
    hidden: int
    head: int
    rotated: int

    @classmethod
    def of(cls, facts: Facts) -> Widths:
        latent, heads = facts.latent, facts.num_heads
        if latent is None:
            head = rotated = facts.head_dim
            query, key = heads * head, facts.num_kv_heads * head
            attention = query, key, key, query
        else:
            head, rotated = latent.content + latent.rotated, latent.rotated
            attention = heads * head, heads * head, heads * latent.value, heads * latent.value
        mlps = facts.intermediate_size, facts.expert_intermediate_size, facts.shared_expert_size
        return cls(*attention, *mlps, facts.hidden_size, head, rotated)


def has_qk_norm(facts: Facts) -> bool:
    return "q_norm" in facts.kinds


def stage_layers(facts: Facts, stages: int, chunks: int, stage: int) -> list[int]:
    """The layers of a pipeline stage, which has ``chunks`` stretches of them, each as many stages from the next."""
    each = facts.num_layers // (stages * chunks)
    return [(chunk * stages + stage) * each + i for chunk in range(chunks) for i in range(each)]


@lru_cache(maxsize=4096)
def _held(facts: Facts, tensor: int, stages: int, chunks: int, experts: int) -> tuple[Held, ...]:
    """By a process of each stage. ``experts``: processes that share a layer's experts."""
    found = []
    for stage in range(stages):
        layers = [facts.layers[number] for number in stage_layers(facts, stages, chunks, stage)]
        dense = sum(layer.whole + layer.cut // tensor for layer in layers)
        ends = (stage == 0) + (stage == stages - 1)
        if stages == 1 and facts.tied_embeddings:
            ends = 1
        dense += -(-facts.vocab_size // tensor) * facts.hidden_size * ends
        dense += facts.hidden_size if stage == stages - 1 else 0  # the last norm
        found.append(Held(dense, sum(layer.experts for layer in layers) // experts))
    return tuple(found)


def held_by_stages(facts: Facts, backend: MegatronBackendConfig) -> tuple[Held, ...]:
    """By a process of each pipeline stage, exactly."""
    experts = backend.expert_parallel * expert_tensor_parallel(backend)
    return _held(facts, backend.tensor_parallel, backend.pipeline_parallel, backend.virtual_stages, experts)


def fullest_stage(facts: Facts, backend: MegatronBackendConfig) -> int:
    """The pipeline stage whose processes hold most; of several the last one."""
    held = held_by_stages(facts, backend)
    return max(range(len(held)), key=lambda stage: (held[stage].both, stage))


# --- adapters -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Adapted:
    """A matrix with a LoRA: the last name of its module, its outputs and inputs, its layer (None: outside of them)."""

    kind: str
    outputs: int
    inputs: int
    layer: int | None


def adapted(adapter: LoraAdapterConfig, facts: Facts) -> tuple[Adapted, ...]:
    return _adapted(facts, facts.linear_modules if ALL_LINEAR in adapter.target_modules else tuple(adapter.target_modules))


@lru_cache(maxsize=64)
def _adapted(facts: Facts, targets: tuple[str, ...]) -> tuple[Adapted, ...]:
    ends = tuple(f".{target}" for target in targets)
    found = []
    for path, (rows, columns) in facts.matrices.items():
        if path in targets or path.endswith(ends):
            kind, number = path.rpartition(".")[2], layer_of(path)
            shape = (columns, rows) if is_embedding(path) else (rows, columns)
            found.append(Adapted(kind, *shape, None if number is None else int(number)))
    return tuple(found)


def adapted_in_stage(adapter: LoraAdapterConfig, facts: Facts, backend: MegatronBackendConfig, stage: int) -> list[Adapted]:
    own = set(stage_layers(facts, backend.pipeline_parallel, backend.virtual_stages, stage))
    return [matrix for matrix in adapted(adapter, facts) if matrix.layer in own]


def lora_parameters(adapter: LoraAdapterConfig, matrices: Iterable[Adapted], tensor: int = 1) -> int:
    """On one of ``tensor`` processes that share each matrix; of a pair of factors one is whole on each."""
    total = 0
    for matrix in matrices:
        outputs = matrix.outputs // (tensor if matrix.kind in COLUMN else 1)
        total += adapter.r * (outputs + matrix.inputs // (tensor if matrix.kind in ROW else 1))
        total += matrix.outputs if adapter.dora else 0
    return total


def trainable_parameters(adapter: NoAdapterConfig | LoraAdapterConfig, facts: Facts) -> int:
    """Of the whole model."""
    if isinstance(adapter, LoraAdapterConfig):
        return lora_parameters(adapter, adapted(adapter, facts))
    return facts.parameters
