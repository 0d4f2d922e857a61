"""Sampling by a vLLM engine in the trainer's process, on the trainer's device, with the trainer's weights."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinkle_research.data_format import SampledSequence, SampleResponse, SamplingParams
from twinkle_research.distributed.runtime import Runtime
from twinkle_research.errors import UserError
from twinkle_research.model.config import LoraAdapterConfig, ModelConfig, NoAdapterConfig
from twinkle_research.randomness import derive_seed
from twinkle_research.sampler.base import (
    Sampler,
    SamplerInput,
    StreamChunk,
    check_prompt,
    encode_prompt,
    extend_feature,
    to_params,
)
from twinkle_research.sampler.config import EngineDType, LoraSync, SleepMode, VLLMSamplerConfig
from twinkle_research.sampler.engine import Engine, EngineOptions
from twinkle_research.sampler.requests import Prompt, RequestMaker, Row, prompt_entries, sampled_entries
from twinkle_research.sampler.stops import Stops, decode
from twinkle_research.sampler.sync import WeightSync

if TYPE_CHECKING:
    from twinkle_research.model.base import TwinkleModel
    from twinkle_research.template.base import Template


class VLLMSampler(Sampler):
    """``folder``: a Hugging Face folder. The engine takes the architecture from it, and with ``options.load_weights`` the
    weights; else it can sample after the first ``sync``. Every rank builds one, after the trainer's process group.

    The ranks of one engine (``options.tensor_parallel``) call ``sample`` together, with the same prompts.
    """

    def __init__(
        self,
        folder: str | Path,
        template: Template | None = None,
        runtime: Runtime | None = None,
        options: EngineOptions | None = None,
        *,
        canary: bool = True,
    ) -> None:
        self.template = template
        self.runtime = runtime or Runtime()
        self.options = options or EngineOptions()
        self.engine = Engine(folder, self.runtime, self.options)
        self._sync = WeightSync(
            self.engine, self.runtime, canary=canary, tensor_parallel=self.options.tensor_parallel,
            as_adapter=self.options.max_lora_rank is not None,
        )  # fmt: skip
        self._end_ids = self.engine.end_ids | ({self.tokenizer.eos_token_id} if template is not None else set()) - {None}
        self._asleep = False
        self._has_weights = self.options.load_weights
        self._adapter_name: str | None = None

    @classmethod
    def from_config(
        cls, config: VLLMSamplerConfig, folder: str | Path, template: Template, runtime: Runtime, *, model: ModelConfig,
        adapter: NoAdapterConfig | LoraAdapterConfig,
    ) -> VLLMSampler:  # fmt: skip
        """The sampler of a run. Collective."""
        beside = config.lora is LoraSync.adapter and isinstance(adapter, LoraAdapterConfig)
        best = 0 if runtime.device.type == "cpu" else 1 if beside else 2  # a CPU's memory is not given back
        level = {SleepMode.auto: best, SleepMode.none: 0, SleepMode.level1: 1, SleepMode.level2: 2}[config.sleep]
        options = EngineOptions(
            dtype=model.dtype.value if config.dtype is EngineDType.auto else config.dtype.value,
            max_model_len=config.max_model_len, max_num_seqs=config.max_num_seqs, tensor_parallel=config.tensor_parallel,
            gpu_memory_utilization=config.gpu_memory_utilization, kv_cache_gib=config.kv_cache_gib,
            expected_tokens=config.max_tokens, enforce_eager=config.enforce_eager,
            sleep_level=level, load_weights=beside,
            max_lora_rank=adapter.r if beside else None, trust_remote_code=model.trust_remote_code,
        )  # fmt: skip
        return cls(folder, template, runtime, options, canary=config.canary)

    @property
    def tokenizer(self) -> Any | None:
        return self.template.tokenizer if self.template is not None else None

    @property
    def data_parallel(self) -> tuple[int, int]:
        size = self.options.tensor_parallel
        return self.runtime.rank // size, self.runtime.world_size // size

    # --- weights and memory -----------------------------------------------------------------------------------------

    def sync(self, model: TwinkleModel, version: int) -> dict[str, float]:
        """Pushes the weights of ``model`` into the engine in place. Raises UserError, naming the tensor, where the engine
        does not have them afterwards. Until it has succeeded nothing can be sampled."""
        self._has_weights, self.version = False, -1
        if self._asleep:
            self.engine.wake_up("weights")
        measured = self._sync.push(model)
        if self._asleep:
            self.engine.wake_up("kv_cache")
            self._asleep = False
        self._drop_cache()
        measured |= self._sync.probe(model)
        self._adapter_name = model.adapter_name
        self._has_weights, self.version = True, version
        return measured

    def sleep(self) -> None:
        """Frees the engine's memory on a GPU. What is cached of prompts is dropped, so that what is sampled next does not depend
        (in its last bits) on what was sampled before; on level 2 the weights as well: then it takes a ``sync`` to sample."""
        if self._asleep:
            return
        self._drop_cache()
        self.engine.sleep(self.options.sleep_level)
        self._asleep = True
        if self.options.sleep_level == 2:
            self._has_weights, self.version = False, -1

    def wake_up(self) -> None:
        """Takes the memory back where the weights were kept; else ``sync`` does."""
        if self._asleep and self._has_weights:
            self.engine.wake_up("weights")
            self.engine.wake_up("kv_cache")
            self._asleep = False

    def close(self) -> None:
        """Frees what the engine holds. Collective. The trainer's process groups live on."""
        if self.engine is not None:
            self.engine.close()
            self.engine = None

    def _drop_cache(self) -> None:
        if not self.engine.reset_prefix_cache():
            raise UserError("the engine has requests under way, so what it has cached of their prompts cannot be dropped")

    def _check_ready(self) -> None:
        if self.engine is None:
            raise UserError("the sampler is closed")
        if not self._has_weights:
            raise UserError("the sampler has no weights, or only some of the last version: call sync first")
        if self._asleep:
            raise UserError("the sampler is asleep: call sync or wake_up first")

    # --- sampling ---------------------------------------------------------------------------------------------------

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
        seed = params.seed if params.seed is not None else self._fresh_seed()
        maker = self._maker(params, adapter_name, use_base_model)
        prompts = self._prompts(inputs, prompt_indices)
        for prompt in prompts:
            maker.add(prompt, [derive_seed(seed, purpose, step, prompt.key, k) for k in range(params.num_samples)])
        self.engine.run(maker.requests)
        return [self._response(prompt, params) for prompt in prompts]

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
        seed = params.seed if params.seed is not None else self._fresh_seed()
        maker = self._maker(params, adapter_name, use_base_model, streams=True)
        (prompt,) = self._prompts([inputs], None)
        maker.add(prompt, [derive_seed(seed, "sample", 0, 0, 0)])
        (row,) = prompt.rows
        for _ in self.engine.steps(maker.requests):
            if not row.request.ended and (piece := row.stream.take()):
                yield StreamChunk(piece)
        sequence = self._response(prompt, params).sequences[0]
        yield StreamChunk(row.stream.take(final=True), sequence.stop_reason)

    def _fresh_seed(self) -> int:
        """The same on the ranks of one engine."""
        seed = secrets.randbits(62)
        return seed if self.options.tensor_parallel == 1 else self.engine.broadcast(seed)

    def _maker(
        self, params: SamplingParams, adapter_name: str | None, use_base_model: bool, streams: bool = False
    ) -> RequestMaker:
        self._check_ready()
        if adapter_name and adapter_name != self._adapter_name:
            raise UserError(f"adapter {adapter_name!r} is not in the engine, which has {self._adapter_name or 'none'}")
        if use_base_model and self._adapter_name and self._sync.lora is None:
            raise UserError("the adapter is merged into the engine's weights, so the base model cannot be sampled")
        stops = Stops.build(params.stop, self._end_ids, self.tokenizer)
        lora = None if use_base_model else self._sync.lora
        return RequestMaker(params, stops, self.tokenizer, self.engine.max_model_len, lora, streams)

    def _prompts(self, inputs: Sequence[SamplerInput], prompt_indices: Sequence[int] | None) -> list[Prompt]:
        keys = list(prompt_indices) if prompt_indices is not None else list(range(len(inputs)))
        if len(keys) != len(inputs):
            raise ValueError(f"prompt_indices has {len(keys)} entries for {len(inputs)} inputs")
        prompts = [Prompt(key, encode_prompt(value, key, self.template)) for value, key in zip(inputs, keys, strict=True)]
        for prompt in prompts:
            check_prompt(prompt.ids, prompt.key, self.engine.vocab_size, self.engine.max_model_len)
        return prompts

    def _response(self, prompt: Prompt, params: SamplingParams) -> SampleResponse:
        response = SampleResponse([self._sequence(prompt, row, params) for row in prompt.rows], list(prompt.ids))
        if params.prompt_logprobs is not None:
            response.prompt_logprobs, response.topk_prompt_logprobs = prompt_entries(prompt, params.prompt_logprobs)
        return response

    def _sequence(self, prompt: Prompt, row: Row, params: SamplingParams) -> SampledSequence:
        request = row.request
        tokens = request.tokens if request is not None else []
        return SampledSequence(
            stop_reason="stop" if request is not None and request.stopped else "length",
            tokens=tokens,
            logprobs=sampled_entries(prompt, row, params.logprobs),
            decoded=self._text(row),
            new_input_feature=extend_feature(prompt.feature, tokens),
            kept=[request.draws.kept[position] for position in range(len(tokens))] if params.filters else None,
        )

    def _text(self, row: Row) -> str | None:
        if self.tokenizer is None:
            return None
        if row.stream is not None:
            return row.stream.close()
        if row.request is None:
            return ""
        # Without stop strings only a token can have stopped it.
        return decode(self.tokenizer, row.request.tokens[:-1] if row.request.stopped else row.request.tokens)
