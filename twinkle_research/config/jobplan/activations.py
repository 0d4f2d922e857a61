"""What a pass keeps for its way back, and what it needs beside it at its worst moment.

Each term is what torch's autograd saves of a token in one layer, as counted on a CPU by saved-tensor hooks in float32 and
bfloat16 (tests/model/megatron/test_plan_activations.py). Kernels of a GPU (flash attention, a fused SwiGLU) keep less: there
it is an upper bound.

``s`` is the bytes of a number in the model's dtype. In bfloat16 the inputs of norms and of a LoRA are kept in float32. Scores
of attention are not kept: torch's kernels reckon them again, but for the CPU's where keys and values of latent attention differ
in width.
"""

from __future__ import annotations

from dataclasses import dataclass

from twinkle_research.config.jobplan.shapes import Widths, adapted, has_qk_norm
from twinkle_research.config.jobplan.workload import Workload
from twinkle_research.model.config import DType, LoraAdapterConfig
from twinkle_research.model.facts import Facts, LatentWidths
from twinkle_research.model.megatron.config import MegatronBackendConfig, Recompute, expert_tensor_parallel
from twinkle_research.trainer.config import TrainConfig

CENTERED_NORMS = ("gemma", "gemma2", "gemma3_text")  # whose weights are used in float32
# Matrices with the same input; with Megatron-Core those of each tuple are one.
_QKV, _DOWN = (("q_proj", "k_proj", "v_proj"),), (("q_proj", "q_a_proj"), ("kv_a_proj_with_mqa",))
_GATE_UP, _SHARED = (("gate_proj", "up_proj"),), (("gate_proj", "up_proj"), ("shared_expert_gate",))


@dataclass(frozen=True)
class _Case:
    """``lora``: kinds of matrix with an adapter, None where all weights are trained. ``tensor`` and ``expert_tensor``:
    processes that share a matrix; ``along``: those that split what lies between the matrices."""

    facts: Facts
    widths: Widths
    size: int
    megatron: bool
    lora: frozenset[str] | None
    rank: int = 0
    tensor: int = 1
    expert_tensor: int = 1
    along: int = 1

    @property
    def trained(self) -> bool:
        return self.lora is None

    def of_lora(self, *kinds: str) -> int:
        return sum(kind in (self.lora or ()) for kind in kinds)

    def matrix_input(self, width: float, *matrices: tuple[str, ...]) -> float:
        """Bytes of the input of ``matrices``: once where they are trained, or for their LoRAs; in bfloat16 these take it as
        float32, and each makes a copy of its own (with Megatron-Core those of a tuple one together)."""
        if self.trained:
            return self.size * width
        counts = [self.of_lora(*kinds) for kinds in matrices]
        if not any(counts) or self.size == 4:
            return self.size * width if any(counts) else 0.0
        return 4 * width * sum(bool(count) if self.megatron else count for count in counts)

    def norm(self, width: float, along: int | None = None) -> float:
        """Bytes of a norm's input and of its scale, and of the normed input where the norm's weight is trained."""
        exact = self.size if self.facts.model_type not in CENTERED_NORMS else 4
        return ((4 + (exact if self.trained else 0)) * width + 4) / (along or self.along)


def bytes_each(config: TrainConfig) -> int:
    return 2 if config.model.dtype is DType.bfloat16 else 4


def _case(config: TrainConfig, facts: Facts) -> _Case:
    adapter, backend = config.adapter, config.backend
    lora = frozenset(matrix.kind for matrix in adapted(adapter, facts)) if isinstance(adapter, LoraAdapterConfig) else None
    rank, widths, size = getattr(adapter, "r", 0), Widths.of(facts), bytes_each(config)
    if not isinstance(backend, MegatronBackendConfig):
        return _Case(facts, widths, size, False, lora, rank)
    along = backend.tensor_parallel if backend.sequence_parallel is not False else 1
    return _Case(facts, widths, size, True, lora, rank, backend.tensor_parallel, expert_tensor_parallel(backend), along)


# --- one layer ------------------------------------------------------------------------------------------------------


def layer_bytes(config: TrainConfig, facts: Facts) -> float:
    """That a layer keeps of a token; of the kind that keeps most, where there are two."""
    case = _case(config, facts)
    mlp = [_dense(case)] if facts.has_dense_layers else []
    mlp += [_mixture(case)] if any(facts.layer_experts) else []
    kept = 2 * case.norm(case.widths.hidden) + max(mlp)
    kept += _attention(case) if facts.latent is None else _latent_attention(case, facts.latent)
    if isinstance(config.backend, MegatronBackendConfig) and config.backend.recompute is Recompute.selective:
        kept -= _recomputed_attention(case)
    return kept


def _attention(case: _Case) -> float:
    """Queries, keys and values after rotation and what attention makes of them, its normaliser; norms of queries and keys."""
    facts, s = case.facts, case.size
    q, k = case.widths.query / case.tensor, case.widths.key / case.tensor
    heads, groups = facts.num_heads / case.tensor, facts.num_kv_heads / case.tensor
    kept = case.matrix_input(case.widths.hidden / case.along, *_QKV)
    kept += 4 * heads + 4 * case.rank * case.of_lora(*_QKV[0], "o_proj") + _output(case)
    # With Megatron-Core keys and values for each head, and cosines and sines.
    kept += s * (3 * q + 4 * case.widths.head if case.megatron else q + 2 * k)
    if has_qk_norm(facts):
        kept += 4 * (q + k) + 4 * (heads + groups) + (s * (q + k) if case.trained else 0)
        if case.megatron and s == 4:
            kept += s * (q + k)  # what lies beside them in the output of the fused matrix
    return kept


def _output(case: _Case) -> float:
    """What attention gives. It is the input of the next matrix, as it lies; with Megatron-Core, or where queries were put
    together out of parts, that is laid out anew."""
    width = case.widths.output / case.tensor
    is_copied = case.megatron or case.facts.latent is not None or (case.size == 2 and not case.trained)
    return case.size * width + (case.matrix_input(width, ("o_proj",)) if is_copied else 0)


def _latent_attention(case: _Case, latent: LatentWidths) -> float:
    """DeepSeek-V2 (arXiv:2405.04434): inputs and norms of the narrow vectors, and queries, keys and values for each head.
    Values lie in the output of a matrix, beside the part of the keys that is not rotated."""
    facts, s, w = case.facts, case.size, case.widths
    kept = case.matrix_input(w.hidden / case.along, *_DOWN) + _output(case)
    kept += 4 * facts.num_heads / case.tensor
    kept += 4 * case.rank * case.of_lora("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    kept += s * (w.query + w.key + w.value + facts.num_heads * latent.content) / case.tensor
    kept += 4 * s * w.rotated if case.megatron else 0
    kept += case.norm(latent.rank) + case.matrix_input(latent.rank / case.along, ("kv_b_proj",))
    if s == 4:
        kept += 4 * latent.rotated  # which lies beside them
    if latent.query_rank:
        kept += case.norm(latent.query_rank) + case.matrix_input(latent.query_rank / case.along, ("q_b_proj",))
    return kept


def _recomputed_attention(case: _Case) -> float:
    """What recompute=selective does not keep: for each head q, k, v and the output. It keeps q and k as they came, and v, which
    lies in the output of the fused matrix."""
    if case.facts.latent is not None:
        return case.size * case.widths.output / case.tensor + 4 * case.facts.num_heads / case.tensor
    q, k = case.widths.query / case.tensor, case.widths.key / case.tensor
    again = q + k + (0 if case.size == 4 and has_qk_norm(case.facts) else q + 2 * k)
    return case.size * (4 * q - again) + 4 * case.facts.num_heads / case.tensor


def _dense(case: _Case) -> float:
    kept = case.matrix_input(case.widths.hidden / case.along, *_GATE_UP)
    return kept + _gated(case, case.widths.mlp / case.tensor)


def _gated(case: _Case, width: float) -> float:
    """SwiGLU (Shazeer 2020, arXiv:2002.05202): gate and up, the gate's activation, and the product."""
    kept = case.size * width * (4 if case.megatron else 3) + case.matrix_input(width, ("down_proj",))
    return kept + 4 * case.rank * case.of_lora("gate_proj", "up_proj", "down_proj")


def _mixture(case: _Case) -> float:
    """A token in each of its experts, and the router's scores. Adapters of experts are refused."""
    facts, s, trained = case.facts, case.size, case.trained
    hidden, width = case.widths.hidden, case.widths.expert / case.expert_tensor
    if case.megatron:
        each = (5 + trained) * width + trained * hidden
    else:
        each = (3 + trained) * width + (1 + trained) * hidden
    scores = 9 * facts.num_experts + 20 * facts.experts_per_token
    routed = (s * facts.experts_per_token * each * case.expert_tensor + scores) / case.along
    return routed + _router_and_shared(case)


def _router_and_shared(case: _Case) -> float:
    """What the router and the expert that all tokens see keep of their common input, and what is made of it."""
    facts, s, hidden = case.facts, case.size, case.widths.hidden / case.along
    is_kept = case.megatron or case.trained
    kept = s * hidden if is_kept else 0.0
    if facts.model_type == "deepseek_v2" and s == 2 and case.trained and not case.megatron:
        kept += 4 * hidden  # for a router in float32
    if not facts.shared_expert_size:
        return kept
    if not case.trained and not (s == 4 and is_kept):
        kept += case.matrix_input(hidden, *_SHARED)
    kept += _gated(case, case.widths.shared / case.tensor)
    if "shared_expert_gate" in facts.kinds:  # what it weighs, and by what
        kept += s * (hidden + 1 / case.along) + 4 * case.rank * case.of_lora("shared_expert_gate")
    return kept


# --- a pass ---------------------------------------------------------------------------------------------------------


def activation_bytes(config: TrainConfig, facts: Facts, work: Workload, *, on_cpu: bool) -> int:
    """At its worst moment, of a process: all that its layers keep, and either the vocabulary projection or the last layer
    on its way back."""
    case, backend = _case(config, facts), config.backend
    layer = layer_bytes(config, facts) + (_scores(case, work.unit_tokens) if on_cpu else 0)
    tokens, between = work.micro_tokens, case.size * case.widths.hidden / case.along
    kept, again = facts.num_layers * layer, 0.0  # of a token: until the pass goes back, and only then
    if isinstance(backend, MegatronBackendConfig):
        tokens = -(-tokens // backend.context_parallel)
        held = _held_layers(backend, facts, work)
        kept = held * layer
        if backend.recompute is Recompute.full:
            kept, again = held / backend.recompute_layers * between, backend.recompute_layers * layer
    elif backend.gradient_checkpointing:
        kept, again = facts.num_layers * between, layer
    worst = max(_head(case, config, tokens), tokens * again + _way_back(case, tokens))
    return int(tokens * (kept + 4 * between) + worst)


def _scores(case: _Case, length: int) -> float:
    """Of a token with all others, which the CPU's kernel keeps where values are not as wide as keys."""
    return 4 * case.facts.num_heads / case.tensor * length if case.widths.value != case.widths.key else 0.0


def _held_layers(backend: MegatronBackendConfig, facts: Facts, work: Workload) -> float:
    """Layers times micro-batches of which the first stage holds something at its fullest. It begins as many micro-batches as
    there are stages before it goes back through one, and so holds a whole model's layers of one; interleaved, somewhat more
    (Narayanan et al. 2021, arXiv:2104.04473). With fewer micro-batches there is less."""
    stages, chunks = backend.pipeline_parallel, backend.virtual_stages
    interleaved = (stages - 1) / (stages * chunks) if chunks > 1 else 0.0
    return facts.num_layers * min(1 + interleaved, work.micro_batches / stages)


def _head(case: _Case, config: TrainConfig, tokens: int) -> float:
    """A chunk of logits in float32 (in bfloat16 the product and the gradient as well); the gradient of trained weights."""
    chunk, rows = min(config.backend.logits_chunk, tokens), case.facts.vocab_size / case.tensor
    of_weights = (4 if case.size == 4 else 6) * rows * case.widths.hidden if case.trained else 0
    return (4 if case.size == 4 else 6) * chunk * rows + of_weights


def _way_back(case: _Case, tokens: int) -> float:
    """Gradients of an MLP's gate and up, and of its largest matrix."""
    width = matrix = case.widths.mlp / case.tensor
    if case.facts.num_experts:
        routed = case.facts.experts_per_token * case.widths.expert / case.along
        width = max(routed, width if case.facts.has_dense_layers else 0)
        matrix = max(case.widths.expert / case.expert_tensor, matrix if case.facts.has_dense_layers else 0)
    return case.size * (2 * tokens * width + (2 * matrix * case.widths.hidden if case.trained else 0))
