"""A batch of sequences that grow together: token ids, masks and the KV cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from twinkle_research.sampler.attention import grouped_attention
from twinkle_research.sampler.cache import SlabCache


@dataclass
class BatchState:
    """Cache and masks of the rows in the making. Prompts are padded on the left, so that all rows grow at one end."""

    ids: Tensor  # [B, P] prompts
    mask: Tensor | None  # [B, tokens so far]; None where no row is padded (cheaper attention)
    lengths: Tensor  # [B] tokens so far, without padding
    cache: SlabCache
    logits: Tensor  # [B, V] of the next token

    @classmethod
    def start(cls, module: nn.Module, prompts: list[list[int]]) -> BatchState:
        device = module.get_input_embeddings().weight.device
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(ids)) + ids for ids in prompts], device=device)
        lengths = torch.tensor([len(ids) for ids in prompts], device=device)
        padded = any(len(ids) < width for ids in prompts)
        mask = (torch.arange(width, device=device) >= (width - lengths).unsqueeze(1)).long() if padded else None
        return cls(ids, mask, lengths, SlabCache(module.config), torch.empty(0, device=device))

    @torch.no_grad()
    def prefill(self, module: nn.Module) -> None:
        positions = torch.arange(self.ids.shape[1], device=self.ids.device) - (self.ids.shape[1] - self.lengths).unsqueeze(1)
        self.logits = self._forward(module, self.ids, positions.clamp(min=0), keep=1)[:, -1]

    @torch.no_grad()
    def prefill_in_pieces(self, module: nn.Module, width: int) -> Iterator[tuple[int, Tensor]]:
        """Yields (first position, logits [B, <= width, V]) over prompts of one length; the cache fills on the way."""
        for start in range(0, self.ids.shape[1], width):
            piece = self.ids[:, start : start + width]
            positions = torch.arange(start, start + piece.shape[1], device=piece.device).expand_as(piece)
            logits = self._forward(module, piece, positions, keep=0)
            self.logits = logits[:, -1]
            yield start, logits

    @torch.no_grad()
    def advance(self, module: nn.Module, tokens: list[int]) -> None:
        """Feeds the new tokens [B]."""
        ids = torch.tensor(tokens, device=self.ids.device).unsqueeze(1)
        if self.mask is not None:
            self.mask = torch.cat([self.mask, self.mask.new_ones(len(tokens), 1)], dim=1)
        with grouped_attention(module):
            self.logits = self._forward(module, ids, self.lengths.unsqueeze(1), keep=1)[:, -1]
        self.lengths = self.lengths + 1

    def select(self, rows: list[int]) -> None:
        """Keeps these rows, in this order; a row may be named several times."""
        if not rows or rows == list(range(len(self.lengths))):
            return
        index = torch.tensor(rows, device=self.ids.device)
        self.cache.reorder_cache(index)
        self._take(index)

    def close_up(self, rows: list[int]) -> None:
        """Keeps these rows: row i is i, or comes from behind those that stay. Copies only what moves."""
        index = torch.tensor(rows, device=self.ids.device)
        self.cache.close_up(rows, index)
        self._take(index)

    def _take(self, index: Tensor) -> None:
        self.lengths, self.logits = self.lengths[index], self.logits[index]
        self.mask = self.mask[index] if self.mask is not None else None

    def _forward(self, module: nn.Module, ids: Tensor, positions: Tensor, keep: int) -> Tensor:
        output = module(
            input_ids=ids, attention_mask=self.mask, position_ids=positions, past_key_values=self.cache, use_cache=True,
            logits_to_keep=keep,
        )  # fmt: skip
        return output.logits
