"""Texts with trained character ranges -> token ids with a trained flag each."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from twinkle_research.errors import DataError
from twinkle_research.template.spans import TrainedText


class Tokens(NamedTuple):
    """One row: ``ids`` int32 and ``trained`` bool, both of shape [T]."""

    ids: np.ndarray
    trained: np.ndarray


class SpanTokenizer:
    """Tokenises a whole text at once, as a sampler would see it, and maps character ranges to tokens by offsets.

    Where the end of a generation prompt would come out in other tokens than the prompt alone, as a sampler gets it (a
    line break merged with one of the answer, or kept apart from the one before because of what follows), the text is
    cut there. A tokenizer without offsets is fed piece by piece and refused where the pieces do not decode to the text.
    """

    def __init__(self, tokenizer: Any, name: str):
        self.name = name
        self.tokenizer = tokenizer
        self.fast = bool(tokenizer.is_fast)
        if self.fast:
            # Post-processors only add special tokens, which the text has already, and trim spaces from offsets.
            self.tokenizer = copy.deepcopy(tokenizer)
            self.tokenizer.backend_tokenizer.post_processor = None
        self._borders = np.asarray(sorted(tokenizer.get_added_vocab().values()), np.int32)  # nothing merges across these
        self._prompt_ends: dict[str, list[int]] = {}

    def __call__(self, texts: Sequence[TrainedText]) -> list[Tokens]:
        if not texts:
            return []
        if not self.fast:
            return [self._pieces(t, sorted({c for span in t.spans for c in span}), check_text=True) for t in texts]
        encoded = self._encode([t.text for t in texts])
        return [self._with_flags(t, np.asarray(ids, np.int32), offsets) for t, ids, offsets in zip(texts, *encoded, strict=True)]

    def ids(self, text: str) -> list[int]:
        """Ids of ``text`` as it stands: nothing is added to it."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _encode(self, texts: list[str]) -> tuple[list[list[int]], list[np.ndarray]]:
        out = self.tokenizer(
            texts,
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        return out["input_ids"], [np.asarray(o, np.int64).reshape(-1, 2) for o in out["offset_mapping"]]

    def _with_flags(self, text: TrainedText, ids: np.ndarray, offsets: np.ndarray) -> Tokens:
        starts, ends = offsets[:, 0], offsets[:, 1]
        cuts = [s for s, _ in text.spans if s and not self._as_prompt(text.text, s, ids, starts)]
        if cuts:
            cut = self._pieces(text, cuts, check_text=False)
            if self._decode(cut.ids) == self._decode(ids):
                return cut
        return Tokens(ids, _flags(starts, ends, text.spans))

    def _as_prompt(self, text: str, start: int, ids: np.ndarray, starts: np.ndarray) -> bool:
        """True where the tokens before character ``start`` are those of the text before it on its own."""
        if not len(ids):
            return True
        end = int(np.searchsorted(starts, start))
        borders = np.flatnonzero(np.isin(ids[:end], self._borders))
        first = int(borders[-1]) if len(borders) else 0
        prompt_end = text[starts[first] : start]
        if prompt_end not in self._prompt_ends:
            if len(self._prompt_ends) > 1000:  # one entry a template, except where prompts have no special tokens
                self._prompt_ends.clear()
            self._prompt_ends[prompt_end] = self.ids(prompt_end)
        return self._prompt_ends[prompt_end] == ids[first:end].tolist()

    def _pieces(self, text: TrainedText, cuts: list[int], check_text: bool) -> Tokens:
        edges = [0, *(c for c in cuts if 0 < c < len(text.text)), len(text.text)]
        ids: list[int] = []
        offsets: list[np.ndarray] = []
        for start, end in zip(edges, edges[1:], strict=False):
            piece = text.text[start:end]
            if self.fast:
                piece_ids, piece_offsets = (part[0] for part in self._encode([piece]))
                offsets.append(piece_offsets + start)
            else:
                piece_ids = self.ids(piece)
                offsets.append(np.tile(np.array([start, end]), (len(piece_ids), 1)))
            ids += piece_ids
        array = np.asarray(ids, np.int32)
        if check_text and self._decode(array) != text.text:
            raise DataError(
                f"the tokenizer of {self.name} gives no character offsets (it is not a fast one) and its pieces do not decode to "
                "the text, so trained tokens cannot be told apart"
            )
        both = np.concatenate(offsets)
        return Tokens(array, _flags(both[:, 0], both[:, 1], text.spans))

    def _decode(self, ids: np.ndarray) -> str:
        return self.tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _flags(starts: np.ndarray, ends: np.ndarray, spans: list[tuple[int, int]]) -> np.ndarray:
    """True for tokens that overlap a span; a token without characters belongs to the span that it stands in."""
    flags = np.zeros(len(starts), bool)
    for start, end in spans:
        flags |= (starts < end) & ((ends > start) | ((starts == ends) & (starts >= start)))
    return flags
