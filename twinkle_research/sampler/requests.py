"""Prompts and completions as requests to the engine, and what the engine answered as ours."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from twinkle_research.data_format import InputFeature, SamplingParams
from twinkle_research.sampler.base import NonFiniteLogits
from twinkle_research.sampler.draws import Uniforms
from twinkle_research.sampler.engine import Request
from twinkle_research.sampler.keyed import Draws
from twinkle_research.sampler.stops import Stops, TextStream

if TYPE_CHECKING:
    import vllm

Entries = list[tuple[int, float]]  # (token id, logprob)


@dataclass
class Row:
    """One completion. ``request`` is None where there is no room for a token."""

    request: Request | None
    stream: TextStream | None


@dataclass
class Prompt:
    """``key``: the prompt index of its draws."""

    key: int
    feature: InputFeature
    rows: list[Row] = field(default_factory=list)
    scored: Request | None = None  # has the log-probabilities of the prompt
    last: Request | None = None  # has those of its last token, where the prompt fills the context

    @property
    def ids(self) -> list[int]:
        return self.feature["input_ids"]


class RequestMaker:
    """Collects the requests of one call. ``streams``: the text is followed even where no stop string asks for it."""

    def __init__(
        self, params: SamplingParams, stops: Stops, tokenizer: Any, limit: int, lora: Any = None, streams: bool = False
    ) -> None:
        self.params = params
        self.stops = stops
        self.limit = limit
        self.requests: list[Request] = []
        self._tokenizer = tokenizer
        self._lora = lora
        self._follows = streams or bool(stops.strings)
        self._engine_params = cache(self._make_params)

    def add(self, prompt: Prompt, seeds: list[int]) -> None:
        """A completion for each seed, and what it takes to score the prompt."""
        room = self.limit - len(prompt.ids)
        max_new = room if self.params.max_tokens is None else min(room, self.params.max_tokens)
        for seed in seeds:
            stream = TextStream(self._tokenizer, self.stops.strings) if self._follows else None
            request = None
            if max_new > 0:
                scores = self.params.prompt_logprobs if not prompt.rows else None
                request = self._add(
                    prompt.ids, self._engine_params(max_new, scores), Draws(Uniforms(seed)), stream.push if stream else None
                )
            prompt.rows.append(Row(request, stream))
        if self.params.prompt_logprobs is not None:
            self._add_scoring(prompt, max_new)

    def _add_scoring(self, prompt: Prompt, max_new: int) -> None:
        if max_new > 0:
            prompt.scored = prompt.rows[0].request
        elif len(prompt.ids) < self.limit:
            prompt.scored = self._add(prompt.ids, scoring_params(self.params.prompt_logprobs))
        elif len(prompt.ids) > 1:
            # The engine wants room for one more token, so the last one is scored as if it were to be sampled.
            prompt.scored = self._add(prompt.ids[:-1], scoring_params(self.params.prompt_logprobs))
            prompt.last = self._add(prompt.ids[:-1], scoring_params(None, logprobs=-1))

    def _add(self, ids: list[int], params: vllm.SamplingParams, draws: Draws | None = None, on_token: Any = None) -> Request:
        self.requests.append(Request(ids, params, draws, on_token, self._lora))
        return self.requests[-1]

    def _make_params(self, max_new: int, prompt_logprobs: int | None) -> vllm.SamplingParams:
        import vllm
        from vllm.sampling_params import RequestOutputKind

        params = self.params
        count = params.logprobs or 0
        return vllm.SamplingParams(
            temperature=params.temperature, top_p=params.top_p, top_k=params.top_k, repetition_penalty=params.repetition_penalty,
            max_tokens=max_new, prompt_logprobs=prompt_logprobs,
            # Where the sampled token is among the most likely ones it must not take the place of another.
            logprobs=count if count > 1 else 0,
            stop_token_ids=sorted(self.stops.ids), ignore_eos=True, detokenize=False, flat_logprobs=True, skip_clone=True,
            output_kind=RequestOutputKind.DELTA if self._follows else RequestOutputKind.FINAL_ONLY,
        )  # fmt: skip


def scoring_params(prompt_logprobs: int | None, logprobs: int | None = None) -> vllm.SamplingParams:
    """For a request that is not there to sample. The engine samples a token all the same."""
    import vllm
    from vllm.sampling_params import RequestOutputKind

    return vllm.SamplingParams(
        temperature=0, max_tokens=1, prompt_logprobs=prompt_logprobs, logprobs=logprobs, ignore_eos=True, detokenize=False,
        flat_logprobs=True, output_kind=RequestOutputKind.FINAL_ONLY,
    )  # fmt: skip


def sampled_entries(prompt: Prompt, row: Row, count: int | None) -> list[Entries] | None:
    """``count`` entries a token: the sampled one, then the most likely others that could have been. Raises
    NonFiniteLogits where the log-probabilities are not those of the sampled tokens."""
    if row.request is None:
        return [] if count is not None else None
    tokens, logprobs = row.request.tokens, row.request.logprobs
    if len(logprobs) < len(tokens):
        raise NonFiniteLogits(f"prompt {prompt.key}: the engine gives {len(logprobs)} log-probabilities for {len(tokens)} tokens")
    for position, (token, entries) in enumerate(zip(tokens, logprobs, strict=False)):
        if not entries or entries[0][0] != token:
            raise NonFiniteLogits(f"prompt {prompt.key}: the engine gives no log-probability for its token {position}")
        if not math.isfinite(entries[0][1]):
            raise NonFiniteLogits(f"prompt {prompt.key}: the model gives NaN or infinite logits at its token {position}")
    if count is None:
        return None
    return [_sampled_first(entries, count) for entries in logprobs[: len(tokens)]]


def _sampled_first(entries: Entries, count: int) -> Entries:
    if count <= 1:
        return entries[:1]
    others = [(token, value) for token, value in entries[1:] if token != entries[0][0] and value > -math.inf]
    return [entries[0], *others[: count - 1]]


def prompt_entries(prompt: Prompt, count: int) -> tuple[list[float | None], list[Entries | None] | None]:
    """Log-probability of each prompt token, and the ``count`` most likely ones with theirs. The first token has neither."""
    positions: list[Entries] = [] if prompt.scored is None else prompt.scored.prompt_logprobs[1:]
    if prompt.last is not None:
        (everything,) = prompt.last.logprobs
        own = next(entry for entry in everything if entry[0] == prompt.ids[-1])
        top = sorted(dict(everything).items(), key=lambda entry: -entry[1])
        positions = [*positions, [own, *top[:count]]]
    if len(positions) != len(prompt.ids) - 1:
        raise NonFiniteLogits(f"prompt {prompt.key}: {len(positions)} log-probabilities for {len(prompt.ids)} tokens")
    scores = [entries[0][1] for entries in positions]
    if not all(map(math.isfinite, scores)):
        raise NonFiniteLogits(f"prompt {prompt.key}: the model gives NaN or infinite logits within the prompt")
    return [None, *scores], [None, *(entries[1 : 1 + count] for entries in positions)] if count else None
