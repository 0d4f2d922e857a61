"""When a completion ends: end-of-turn and stop tokens, and stop strings that may lie across tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from twinkle_research.errors import UserError

_REPLACEMENT = "�"  # what an incomplete UTF-8 character decodes to
_ESCAPES = {r"\n": "\n", r"\t": "\t", r"\r": "\r", r"\\": "\\"}


def unescape(text: str) -> str:
    r"""``\n``, ``\t``, ``\r`` and ``\\`` as the characters they stand for.

    A shell or Hydra's command line delivers ``stop=['\n']`` as a backslash and an n, which no model ever writes.
    """
    return re.sub(r"\\[ntr\\]", lambda match: _ESCAPES[match.group()], text)


@dataclass(frozen=True)
class Stops:
    """``ids`` end a completion by themselves; ``strings`` as soon as its text contains one."""

    ids: frozenset[int]
    strings: tuple[str, ...]

    @classmethod
    def build(cls, stop: str | list[str] | list[int] | None, end_ids: Iterable[int], tokenizer: Any | None) -> Stops:
        """Of ``SamplingParams.stop`` and the model's own end tokens. A string that is one special token is its id:
        special tokens have no text that could be searched."""
        ids, strings = set(end_ids), []
        for value in [stop] if isinstance(stop, str) else stop or []:
            if isinstance(value, int) and not isinstance(value, bool):
                ids.add(value)
                continue
            if not isinstance(value, str) or not value:
                raise UserError(f"stop: {value!r} is neither a token id nor a non-empty string")
            if tokenizer is None:
                raise UserError(f"stop: the string {value!r} needs a template with a tokenizer; this sampler has none")
            special = tokenizer.get_added_vocab().get(value)
            if special is not None:
                ids.add(special)
            else:
                strings.append(value)
        return cls(frozenset(ids), tuple(strings))


class TextStream:
    """Decodes tokens one by one and watches for stop strings.

    ``text`` is what is final so far: whole characters only, and cut before a stop string once one was found.
    """

    def __init__(self, tokenizer: Any, stop_strings: tuple[str, ...] = ()) -> None:
        self.text = ""
        self.stopped = False
        self._tokenizer = tokenizer
        self._stops = stop_strings
        self._ids: list[int] = []
        self._window = 0  # tokens before it have no influence on how later ones decode
        self._read = 0  # tokens before it are in ``text``
        self._given = 0  # characters that ``take`` has handed out

    def push(self, token: int) -> bool:
        """Adds a token; True when a stop string is complete."""
        self._ids.append(token)
        new = self._new_text()
        if not new or new.endswith(_REPLACEMENT):
            return False
        self._window, self._read = self._read, len(self._ids)
        return self._append(new)

    def close(self) -> str:
        """Adds what was held back as an incomplete character; returns the final text."""
        if not self.stopped:
            self._append(self._new_text())
        return self.text

    def take(self, final: bool = False) -> str:
        """The text since the last call, without an end that may become a stop string (all of it when ``final``)."""
        end = len(self.text)
        if not (final or self.stopped):
            end -= max((self._overlap(stop) for stop in self._stops), default=0)
        piece = self.text[self._given : end]
        self._given += len(piece)
        return piece

    def _new_text(self) -> str:
        known = self._decode(self._ids[self._window : self._read])
        return self._decode(self._ids[self._window :])[len(known) :]

    def _decode(self, ids: list[int]) -> str:
        return decode(self._tokenizer, ids)

    def _append(self, new: str) -> bool:
        start = len(self.text)
        self.text += new
        found = [self.text.find(stop, max(0, start - len(stop) + 1)) for stop in self._stops]
        found = [position for position in found if position >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.stopped = True
        return self.stopped

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of ``text`` that is a beginning of ``stop``."""
        return next((n for n in range(min(len(stop) - 1, len(self.text)), 0, -1) if self.text.endswith(stop[:n])), 0)


def decode(tokenizer: Any, ids: list[int]) -> str:
    """Text without special tokens, spaces as they are."""
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
