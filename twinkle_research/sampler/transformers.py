"""Sampling from a Hugging Face model in memory, batched, with a KV cache; no further dependency."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from twinkle_research.data_format import InputFeature, SampledSequence, SampleResponse, SamplingParams
from twinkle_research.errors import UserError
from twinkle_research.randomness import derive_seed
from twinkle_research.sampler.base import (
    NonFiniteLogits,
    Sampler,
    SamplerInput,
    StreamChunk,
    check_prompt,
    encode_prompt,
    extend_feature,
    to_params,
)
from twinkle_research.sampler.batch import BatchState
from twinkle_research.sampler.draws import Uniforms
from twinkle_research.sampler.filter import draw, filter_logits, kept_ids, penalise_repetition
from twinkle_research.sampler.mode import sampling_mode
from twinkle_research.sampler.stops import Stops, TextStream, decode

if TYPE_CHECKING:
    from twinkle_research.template.base import Template

_SCORED_LOGITS = 2**26  # logits held at one time while prompts are scored


@dataclass
class _Prompt:
    position: int  # in the caller's list
    key: int  # the prompt index of its draws
    feature: InputFeature
    scores: list[float | None] | None = None
    top_scores: list[list[tuple[int, float]] | None] | None = None

    @property
    def ids(self) -> list[int]:
        return self.feature["input_ids"]

    @property
    def name(self) -> str:
        return f"prompt {self.key}"


@dataclass
class _Row:
    """One completion in the making."""

    prompt: _Prompt
    max_new: int
    uniforms: Uniforms
    stream: TextStream | None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    stop_reason: str | None = None
    stop_token: bool = False
    kept: list[list[int]] = field(default_factory=list)

    def add(self, token: int, stops: Stops) -> None:
        self.tokens.append(token)
        string_found = self.stream.push(token) if self.stream is not None else False
        if token in stops.ids:
            self.stop_reason, self.stop_token = "stop", True
        elif string_found:
            self.stop_reason = "stop"
        elif len(self.tokens) == self.max_new:
            self.stop_reason = "length"


class TransformersSampler(Sampler):
    """Samples from ``module``, a causal LM of transformers or a PEFT model around one, as its weights are now.

    ``template`` renders conversations and decodes; without one only token ids go in and out. At most ``max_rows``
    completions are in the making at one time. The module is put into eval mode while it samples.
    """

    def __init__(self, module: nn.Module, template: Template | None = None, *, max_rows: int = 128) -> None:
        if max_rows < 1:
            raise ValueError(f"max_rows must be >= 1, got {max_rows}")
        self.module = module
        self.template = template
        self.max_rows = max_rows

    @property
    def tokenizer(self) -> Any | None:
        return self.template.tokenizer if self.template is not None else None

    def sample(
        self,
        inputs: Sequence[SamplerInput],
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        adapter_name: str | None = None,
        *,
        use_base_model: bool = False,
        step: int = 0,
        prompt_indices: Sequence[int] | None = None,
        purpose: str = "sample",
    ) -> list[SampleResponse]:
        params = to_params(sampling_params)
        prompts = self._prompts(inputs, prompt_indices)
        stops = Stops.build(params.stop, self._end_ids(), self.tokenizer)
        seed = params.seed if params.seed is not None else secrets.randbits(62)
        rows = [
            self._row(prompt, params, stops, derive_seed(seed, purpose, step, prompt.key, k))
            for prompt in prompts
            for k in range(params.num_samples)
        ]
        with sampling_mode(self.module, adapter_name, use_base_model):
            for batch in _batches(rows, self.max_rows, same_length=params.prompt_logprobs is not None):
                for _ in self._decode(batch, params, stops):
                    pass
        n = params.num_samples
        return [self._response(prompt, rows[i * n : (i + 1) * n], params) for i, prompt in enumerate(prompts)]

    def sample_stream(
        self,
        inputs: SamplerInput,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        adapter_name: str | None = None,
        *,
        use_base_model: bool = False,
    ) -> Iterator[StreamChunk]:
        params = to_params(sampling_params)
        if self.tokenizer is None:
            raise UserError("streaming text needs a template with a tokenizer; this sampler has none")
        (prompt,) = self._prompts([inputs], None)
        stops = Stops.build(params.stop, self._end_ids(), self.tokenizer)
        seed = params.seed if params.seed is not None else secrets.randbits(62)
        row = self._row(prompt, params, stops, derive_seed(seed, "sample", 0, 0, 0))
        row.stream = stream = TextStream(self.tokenizer, stops.strings)
        with sampling_mode(self.module, adapter_name, use_base_model):
            for _ in self._decode([row], params, stops):
                if row.stop_reason is None and (piece := stream.take()):
                    yield StreamChunk(piece)
        stream.close()
        yield StreamChunk(stream.take(final=True), row.stop_reason)

    # --- requests and answers ---------------------------------------------------------------------------------------

    def _prompts(self, inputs: Sequence[SamplerInput], prompt_indices: Sequence[int] | None) -> list[_Prompt]:
        keys = list(prompt_indices) if prompt_indices is not None else list(range(len(inputs)))
        if len(keys) != len(inputs):
            raise ValueError(f"prompt_indices has {len(keys)} entries for {len(inputs)} inputs")
        config = self.module.config.get_text_config()
        prompts = []
        for position, (value, key) in enumerate(zip(inputs, keys, strict=True)):
            prompt = _Prompt(position, key, encode_prompt(value, key, self.template))
            check_prompt(prompt.ids, key, config.vocab_size, self._limit())
            prompts.append(prompt)
        return prompts

    def _row(self, prompt: _Prompt, params: SamplingParams, stops: Stops, seed: int) -> _Row:
        limits = [params.max_tokens, None if (limit := self._limit()) is None else limit - len(prompt.ids)]
        known = [n for n in limits if n is not None]
        if not known:
            raise UserError("max_tokens: needed for a model without a limit of its own")
        stream = TextStream(self.tokenizer, stops.strings) if stops.strings else None
        row = _Row(prompt, min(known), Uniforms(seed), stream)
        if row.max_new == 0:
            row.stop_reason = "length"
        return row

    def _response(self, prompt: _Prompt, rows: list[_Row], params: SamplingParams) -> SampleResponse:
        sequences = [
            SampledSequence(
                stop_reason=row.stop_reason,
                tokens=row.tokens,
                logprobs=row.logprobs if params.logprobs is not None else None,
                decoded=self._text(row),
                new_input_feature=extend_feature(prompt.feature, row.tokens),
                kept=row.kept if params.filters else None,
            )
            for row in rows
        ]
        return SampleResponse(sequences, list(prompt.ids), prompt.scores, prompt.top_scores)

    def _text(self, row: _Row) -> str | None:
        if self.tokenizer is None:
            return None
        if row.stream is not None:
            return row.stream.close()
        return decode(self.tokenizer, row.tokens[:-1] if row.stop_token else row.tokens)

    def _limit(self) -> int | None:
        # Models without learned or rotary positions have no such setting.
        return getattr(self.module.config.get_text_config(), "max_position_embeddings", None)

    def _end_ids(self) -> set[int]:
        """The model's end tokens: those of its generation config and its tokenizer's."""
        configured = self.module.generation_config.eos_token_id
        ids = set(configured) if isinstance(configured, list) else {configured}
        if self.tokenizer is not None:
            ids.add(self.tokenizer.eos_token_id)
        return ids - {None}

    # --- the loop ---------------------------------------------------------------------------------------------------

    def _decode(self, rows: list[_Row], params: SamplingParams, stops: Stops) -> Iterator[None]:
        """Completes ``rows`` together; yields after each token. Finished rows leave the batch at once."""
        live = [row for row in rows if row.stop_reason is None]
        read = live if params.prompt_logprobs is None else rows
        prompts = list({row.prompt.position: row.prompt for row in read}.values())
        if not prompts:
            return
        state = self._prefill(prompts, params)
        place = {prompt.position: i for i, prompt in enumerate(prompts)}
        state.select([place[row.prompt.position] for row in live])  # a prompt's completions share its prefill
        seen = _seen_tokens(live, state.logits) if params.repetition_penalty != 1 else None
        while live:
            logits = state.logits.float()
            if seen is not None:
                logits = penalise_repetition(logits, seen, params.repetition_penalty)
            tokens = self._next_tokens(live, logits, params)
            for row, token in zip(live, tokens, strict=True):
                row.add(token, stops)
            yield
            going_on = _closed_up([row.stop_reason is None for row in live])
            if not going_on:
                return
            if len(going_on) < len(live):
                live = [live[i] for i in going_on]
                tokens = [tokens[i] for i in going_on]
                state.close_up(going_on)
                seen = seen[going_on] if seen is not None else None
            if seen is not None:
                seen[range(len(live)), tokens] = True
            state.advance(self.module, tokens)

    def _next_tokens(self, live: list[_Row], logits: Tensor, params: SamplingParams) -> list[int]:
        """Draws a token for each row and records its log-probability. Raises NonFiniteLogits, naming the prompt."""
        logits = filter_logits(logits, params.temperature, params.top_k, params.top_p)
        if params.temperature == 0:
            chosen = logits.argmax(dim=-1)
        else:
            uniforms = torch.tensor([row.uniforms[len(row.tokens)] for row in live], dtype=torch.float64, device=logits.device)
            chosen = draw(logits, uniforms)
            if params.filters:
                for row, ids in zip(live, kept_ids(logits), strict=True):
                    row.kept.append(ids)
        normaliser = logits.logsumexp(dim=-1)
        chosen_logprobs = logits.gather(-1, chosen.unsqueeze(-1)).squeeze(-1) - normaliser
        tokens, logprobs = chosen.tolist(), chosen_logprobs.tolist()
        for row, logprob in zip(live, logprobs, strict=True):
            if not math.isfinite(logprob):
                raise NonFiniteLogits(f"{row.prompt.name}: the model gives NaN or infinite logits at its token {len(row.tokens)}")
        if params.logprobs is not None:
            entries = [[pair] for pair in zip(tokens, logprobs, strict=True)]
            if params.logprobs > 1:
                _add_others(entries, logits - normaliser.unsqueeze(-1), params.logprobs)
            for row, entry in zip(live, entries, strict=True):
                row.logprobs.append(entry)
        return tokens

    def _prefill(self, prompts: list[_Prompt], params: SamplingParams) -> BatchState:
        state = BatchState.start(self.module, [prompt.ids for prompt in prompts])
        if params.prompt_logprobs is None:
            state.prefill(self.module)
            return state
        vocab = self.module.config.get_text_config().vocab_size
        width = max(1, _SCORED_LOGITS // (vocab * len(prompts)))
        for prompt in prompts:
            prompt.scores, prompt.top_scores = [None], [None] if params.prompt_logprobs else None
        for start, logits in state.prefill_in_pieces(self.module, width):
            _score(prompts, start, logits.float().log_softmax(dim=-1), params.prompt_logprobs)
        return state


def _batches(rows: list[_Row], max_rows: int, same_length: bool) -> Iterator[list[_Row]]:
    """Rows of like prompt length together (of one length if ``same_length``), completions of one prompt side by side."""
    batch: list[_Row] = []
    for row in sorted(rows, key=lambda row: len(row.prompt.ids)):
        if batch and (len(batch) == max_rows or (same_length and len(row.prompt.ids) != len(batch[0].prompt.ids))):
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def _closed_up(alive: list[bool]) -> list[int]:
    """The rows that go on, each in its place; those at the end fill the places of the others."""
    count = sum(alive)
    last = (i for i in range(len(alive) - 1, count - 1, -1) if alive[i])
    return [i if alive[i] else next(last) for i in range(count)]


def _seen_tokens(rows: list[_Row], logits: Tensor) -> Tensor:
    """[B, V], True for the tokens of each row's prompt."""
    seen = torch.zeros_like(logits, dtype=torch.bool)
    for i, row in enumerate(rows):
        seen[i, row.prompt.ids] = True
    return seen


def _add_others(entries: list[list[tuple[int, float]]], logprobs_BV: Tensor, count: int) -> None:
    """To each row's (sampled token, logprob) the most likely others of the kept set, up to ``count`` in all."""
    top = logprobs_BV.topk(min(count, logprobs_BV.shape[-1]), dim=-1)
    for row, ids, values in zip(entries, top.indices.tolist(), top.values.tolist(), strict=True):
        others = [(i, v) for i, v in zip(ids, values, strict=True) if i != row[0][0] and v > -math.inf]
        row.extend(others[: count - 1])


def _score(prompts: list[_Prompt], start: int, logprobs: Tensor, count: int) -> None:
    """Appends the log-probabilities of the prompt tokens that logits at positions ``start`` onwards predict."""
    for prompt, logprobs_TV in zip(prompts, logprobs, strict=True):
        targets = prompt.ids[start + 1 : start + 1 + len(logprobs_TV)]
        logprobs_TV = logprobs_TV[: len(targets)]
        prompt.scores.extend(logprobs_TV[range(len(targets)), targets].tolist())
        if not all(math.isfinite(value) for value in prompt.scores[1:]):
            raise NonFiniteLogits(f"{prompt.name}: the model gives NaN or infinite logits within the prompt")
        if count:
            top = logprobs_TV.topk(count, dim=-1)
            pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
            prompt.top_scores.extend(list(zip(ids, values, strict=True)) for ids, values in pairs)
