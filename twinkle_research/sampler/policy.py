"""The transformers sampler on the very model that is trained: nothing to copy, nothing to keep in step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from twinkle_research.data_format import SampleResponse, SamplingParams
from twinkle_research.sampler.base import Sampler, SamplerInput, StreamChunk
from twinkle_research.sampler.transformers import TransformersSampler

if TYPE_CHECKING:
    from twinkle_research.distributed.runtime import Runtime
    from twinkle_research.model.base import TwinkleModel
    from twinkle_research.template.base import Template


class PolicySampler(Sampler):
    """Samples from ``model`` as it is now, its adapter on. Where the model is sharded all ranks sample the same prompts,
    since every pass is collective; elsewhere each its own."""

    def __init__(self, model: TwinkleModel, template: Template, runtime: Runtime, *, max_rows: int = 128) -> None:
        self.model = model
        self.template = template
        self.runtime = runtime
        self.max_rows = max_rows

    @property
    def data_parallel(self) -> tuple[int, int]:
        return (0, 1) if self.model.is_sharded else (self.runtime.rank, self.runtime.world_size)

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
        with self.model.sampling(adapter_name) as module:
            return TransformersSampler(module, self.template, max_rows=self.max_rows).sample(
                inputs, sampling_params, use_base_model=use_base_model, step=step, prompt_indices=prompt_indices, purpose=purpose
            )

    def sample_stream(
        self,
        inputs: SamplerInput,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        adapter_name: str | None = None,
        *,
        use_base_model: bool = False,
    ) -> Iterator[StreamChunk]:
        with self.model.sampling(adapter_name) as module:
            sampler = TransformersSampler(module, self.template, max_rows=self.max_rows)
            yield from sampler.sample_stream(inputs, sampling_params, use_base_model=use_base_model)
