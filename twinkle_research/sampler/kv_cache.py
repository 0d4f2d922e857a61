"""How large a KV cache is. Nothing here imports torch or vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twinkle_research.distributed.gpus import GIB

if TYPE_CHECKING:
    from twinkle_research.model.facts import Facts

CPU_BLOCK = 32  # tokens; the CPU's attention takes multiples of 32
USUAL_PROMPT = 256  # tokens
USUAL_CONTEXT = 8192  # tokens, of a model that does not say


def bytes_per_token(facts: Facts, size: int, tensor_parallel: int = 1) -> int:
    """Keys and values of a token on one of the processes that share an engine; ``size``: bytes of a number. 0: not known.
    With fewer key-value heads than processes, as vLLM has it, each process has one; of latent attention the narrow vector,
    whole."""
    if facts.latent is not None:
        return facts.num_layers * (facts.latent.rank + facts.latent.rotated) * size
    return 2 * facts.num_layers * -(-facts.num_kv_heads // tensor_parallel) * facts.head_dim * size


def cpu_cache_bytes(
    facts: Facts, size: int, *, tensor_parallel: int, max_model_len: int | None, max_num_seqs: int, expected_tokens: int
) -> int:
    """Bytes of a cache that has what the completions need, up to 1 GiB, but at least one context."""
    per_token = bytes_per_token(facts, size, tensor_parallel)
    if not per_token:  # an architecture of another kind
        return GIB
    context = max_model_len or facts.max_positions or USUAL_CONTEXT
    several = min(max_num_seqs * (expected_tokens + USUAL_PROMPT), GIB // per_token)
    blocks = -(-max(context, several) // CPU_BLOCK) + 2  # one is never used
    return blocks * CPU_BLOCK * per_token
