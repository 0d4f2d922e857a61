"""Texts with trained turns -> token ids with a trained flag each."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from twinkle_research.errors import DataError
from twinkle_research.template.rendering import PROBE
from twinkle_research.template.spans import TrainedText, TrainedTurn


class Tokens(NamedTuple):
    """One row: ``ids`` int32 and ``trained`` bool, both of shape [T]."""

    ids: np.ndarray
    trained: np.ndarray


class _Encoded(NamedTuple):
    """``ids`` int32 [T] and the character range of each, ``offsets`` int64 [T, 2]."""

    ids: np.ndarray
    offsets: np.ndarray


class SpanTokenizer:
    """Tokenises a whole text at once, as a sampler would see it, and maps character ranges to tokens by offsets.

    Where a turn would not consist of tokens that a sampler could have produced (its first line break has merged with the
    one of the generation prompt, say) the text is cut there. Later turns then see those very tokens, as they do in a rollout.

    A tokenizer without offsets is fed piece by piece and refused where the pieces do not decode to the text.
    """

    def __init__(self, tokenizer: Any, name: str):
        self.name = name
        self.tokenizer = tokenizer
        self.fast = bool(tokenizer.is_fast)
        if self.fast:
            # Post-processors only add special tokens, which the text has already, and trim spaces from offsets.
            self.tokenizer = copy.deepcopy(tokenizer)
            self.tokenizer.backend_tokenizer.post_processor = None
        added = tokenizer.get_added_vocab()
        self._markers = sorted(added, key=len, reverse=True)
        self._borders = np.asarray(sorted(added.values()), np.int32)  # nothing merges across these
        self._prompt_ends: dict[str, list[int]] = {}
        self._lead: str | None = None

    def __call__(self, texts: Sequence[TrainedText]) -> list[Tokens]:
        if not texts:
            return []
        if not self.fast:
            return [self._in_pieces(t) for t in texts]
        return [self._with_flags(t, e) for t, e in zip(texts, self._encode([t.text for t in texts]), strict=True)]

    def ids(self, text: str) -> list[int]:
        """Ids of ``text`` as it stands: nothing is added to it."""
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def ids_after(self, before: str, text: str) -> list[int]:
        """Ids of ``text`` where it follows ``before``, which ends where a sampler stopped."""
        if not self.fast:
            return self.ids(text)
        marker = next((m for m in self._markers if before.endswith(m)), None)
        return (self._continued(text) if marker is None else self._without_lead(marker, text)).ids.tolist()

    def _encode(self, texts: list[str]) -> list[_Encoded]:
        out = self.tokenizer(
            texts,
            add_special_tokens=False,
            return_offsets_mapping=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        pairs = zip(out["input_ids"], out["offset_mapping"], strict=True)
        return [_Encoded(np.asarray(ids, np.int32), np.asarray(o, np.int64).reshape(-1, 2)) for ids, o in pairs]

    def _with_flags(self, text: TrainedText, encoded: _Encoded) -> Tokens:
        cuts = {cut for turn in text.turns for cut in self._cuts(text.text, turn, encoded)}
        if cuts:
            encoded = self._cut(text.text, sorted(cuts))
        return Tokens(encoded.ids, _flags(encoded, [span for turn in text.turns for span in turn.spans]))

    def _cuts(self, text: str, turn: TrainedTurn, encoded: _Encoded) -> set[int]:
        """Where the text must be cut so that the turn consists of tokens that a sampler could have produced."""
        starts, ends = encoded.offsets[:, 0], encoded.offsets[:, 1]
        cuts = set()
        for place in (turn.start, turn.first, turn.end):
            count = int(np.searchsorted(starts, place))  # of tokens that start before it
            inside = count > 0 and ends[count - 1] > place
            if place == turn.end and inside and encoded.ids[count - 1] in self._borders:
                inside = False  # an end marker that swallows the white space after it is still the end marker
            if inside or (0 < place == turn.start and not self._as_prompt(text, place, encoded, count)):
                cuts.add(place)
        return cuts

    def _as_prompt(self, text: str, start: int, encoded: _Encoded, end: int) -> bool:
        """True where the tokens before character ``start``, ``end`` in number, are those of the text before it on its own."""
        borders = np.flatnonzero(np.isin(encoded.ids[:end], self._borders))
        first = int(borders[-1]) if len(borders) else 0
        if not end:
            return True
        prompt_end = text[encoded.offsets[first, 0] if len(borders) else 0 : start]
        if prompt_end not in self._prompt_ends:
            if len(self._prompt_ends) > 1000:  # one entry a template, except where prompts have no special tokens
                self._prompt_ends.clear()
            self._prompt_ends[prompt_end] = self.ids(prompt_end)
        return self._prompt_ends[prompt_end] == encoded.ids[first:end].tolist()

    def _cut(self, text: str, cuts: list[int]) -> _Encoded:
        pieces = [self._encode([text[: cuts[0]]])[0]]
        for start, end in zip(cuts, [*cuts[1:], len(text)], strict=True):
            piece = self._continued(text[start:end])
            pieces.append(_Encoded(piece.ids, piece.offsets + start))
        return _Encoded(np.concatenate([p.ids for p in pieces]), np.concatenate([p.offsets for p in pieces]))

    def _continued(self, text: str) -> _Encoded:
        """``text`` as it continues other text: without the mark that some tokenizers put before the first word."""
        if self._lead is None:
            self._lead = self._find_lead()
        return self._without_lead(self._lead, text)

    def _without_lead(self, lead: str, text: str) -> _Encoded:
        encoded = self._encode([lead + text])[0]
        kept = encoded.offsets[:, 0] >= len(lead) if lead else np.ones(len(encoded.ids), bool)
        return _Encoded(encoded.ids[kept], encoded.offsets[kept] - len(lead))

    def _find_lead(self) -> str:
        """Text after which other text is tokenised as if it continued something: a special token, or a rare character."""
        plain = [t.content for t in self.tokenizer.added_tokens_decoder.values() if not t.rstrip and t.content.strip()]
        for lead in ("", *plain[:1], PROBE[0]):
            before = self.ids("a")
            joined = [self._decode(before + self._without_lead(lead, text).ids.tolist()) for text in ("b", "\nb")]
            if joined == [self._decode(before) + text for text in ("b", "\nb")]:
                return lead
        raise DataError(
            f"the tokenizer of {self.name} joins the end of a generation prompt with the beginning of the answer, and cannot "
            "tokenise the answer on its own"
        )

    def _in_pieces(self, text: TrainedText) -> Tokens:
        spans = [span for turn in text.turns for span in turn.spans]
        inner = {c for turn in text.turns for c in (turn.start, turn.first, turn.end)}.union(*spans)
        edges = [0, *sorted(c for c in inner if 0 < c < len(text.text)), len(text.text)]
        ids: list[int] = []
        trained: list[bool] = []
        for start, end in zip(edges, edges[1:], strict=False):
            piece = self.ids(text.text[start:end])
            ids += piece
            trained += [any(s <= start and end <= e for s, e in spans)] * len(piece)
        if self._decode(ids) != text.text:
            raise DataError(
                f"the tokenizer of {self.name} gives no character offsets (it is not a fast one) and its pieces do not decode to "
                "the text, so trained tokens cannot be told apart"
            )
        return Tokens(np.asarray(ids, np.int32), np.asarray(trained, bool))

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _flags(encoded: _Encoded, spans: list[tuple[int, int]]) -> np.ndarray:
    """True for tokens that overlap a span; a token without characters belongs to the span that it stands in."""
    starts, ends = encoded.offsets[:, 0], encoded.offsets[:, 1]
    flags = np.zeros(len(starts), bool)
    for start, end in spans:
        flags |= (starts < end) & ((ends > start) | ((starts == ends) & (starts >= start)))
    return flags
