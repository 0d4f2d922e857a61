"""Keyed draws inside the engine, in place of vLLM's own random numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from twinkle_research.sampler.draws import Uniforms
from twinkle_research.sampler.filter import draw, kept_ids


@dataclass
class Draws:
    """Of one completion: the numbers that decide its tokens and, where tokens are filtered, the ids left to draw from."""

    uniforms: Uniforms
    kept: dict[int, list[int]] = field(default_factory=dict)


class KeyedDraw(nn.Module):
    """Takes the place of vLLM's ``TopKTopPSampler``: filters logits as that does, then draws by our own numbers.

    vLLM's seeded generators advance one by one, also for a draw that is thrown away (a prompt that is computed in pieces;
    on CPU this is an error), so what they give depends on the rest of the batch. Here token t of a completion is decided by
    number t of that completion, which makes it that of the transformers sampler too. The ids that the filter left are
    read off the distribution that is really drawn from, ties included.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self._runner = runner  # a GPUModelRunner (the CPU's derives from it)
        self.draws: dict[str, Draws] = {}  # by the engine's request id

    def forward(
        self, logits: Tensor, generators: dict[int, torch.Generator], k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

        logits = apply_top_k_top_p(logits, k, p)
        logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
        ids = self._runner.input_batch.req_ids
        assert len(ids) == len(logits), "a row of logits for each request"
        # Where a draw is thrown away the position does not move, and the next one overwrites it.
        positions = [len(self._runner.requests[request].output_token_ids) for request in ids]
        rows = [self.draws[request] for request in ids]
        numbers = [row.uniforms[position] for row, position in zip(rows, positions, strict=True)]
        tokens = draw(logprobs, torch.tensor(numbers, dtype=torch.float64).to(logits.device, non_blocking=True))
        if k is not None or p is not None:
            for row, position, kept in zip(rows, positions, kept_ids(logprobs), strict=True):
                row.kept[position] = kept
        return tokens, logprobs
