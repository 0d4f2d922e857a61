"""The sampler interface: prompts in, completions with their log-probabilities out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from twinkle_research.data_format import IGNORE_INDEX, InputFeature, SampleResponse, SamplingParams, Trajectory
from twinkle_research.errors import DataError, UserError

if TYPE_CHECKING:
    from twinkle_research.model.base import TwinkleModel
    from twinkle_research.template.base import Template

SamplerInput = Sequence[int] | InputFeature | Trajectory


class NonFiniteLogits(UserError):
    """The model gave NaN or infinite logits for a prompt; nothing can be sampled from them."""


@dataclass(frozen=True)
class StreamChunk:
    """A piece of a streamed answer. ``finish_reason`` is set in the last one."""

    delta: str
    finish_reason: Literal["length", "stop"] | None = None


class Sampler(ABC):
    """Samples completions. The same request gives the same tokens, whatever else is in the batch.

    ``version``: the number that the last ``sync`` gave to the weights; -1 before the first.
    """

    version: int = -1

    @property
    def data_parallel(self) -> tuple[int, int]:
        """(rank, size): which share of a step's prompts this process samples. Ranks of one share sample the same."""
        return 0, 1

    def sync(self, model: TwinkleModel, version: int) -> dict[str, float]:
        """Makes the weights that the sampler uses those of ``model`` as it is now; returns what that cost, as metrics.
        Collective. Here for samplers that use the model itself."""
        self.version = version
        return {}

    def sleep(self) -> None:  # noqa: B027 (samplers that hold nothing of their own)
        """Gives memory back while the model trains."""

    def wake_up(self) -> None:  # noqa: B027
        """Undoes ``sleep``."""

    def close(self) -> None:  # noqa: B027
        """Ends the sampler; it cannot be used again."""

    @abstractmethod
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
        """One response for each input, in their order, with ``num_samples`` sequences each.

        An input is a list of token ids, an encoded row or a conversation (rendered with the generation prompt).
        The draw of token t of completion k is keyed by (``sampling_params.seed``, ``purpose``, ``step``, prompt index,
        k, t). The prompt index is the position in ``inputs``, or ``prompt_indices[i]`` where a caller holds a part of
        a larger set (one rank of several). Without a seed every call draws anew.

        Tokens include the one that stopped (end of turn, stop token, all tokens of a stop string), so they are what
        is trained; ``decoded`` leaves the stop out. ``logprobs`` are those of the distribution really sampled from:
        after temperature, top-k, top-p and repetition penalty; at temperature 0 the untempered ones. ``kept`` are the
        token ids that top-k and top-p left to draw from, per token; None where they are off or the choice is greedy.
        ``prompt_logprobs`` are the model's own (temperature 1, unfiltered); the first token has none.
        A prompt that fills the model's context gives an empty completion, stop reason "length".

        Raises DataError for a prompt that cannot be used and NonFiniteLogits for a model that gives NaN, naming the
        prompt.
        """

    @abstractmethod
    def sample_stream(
        self,
        inputs: SamplerInput,
        sampling_params: SamplingParams | Mapping[str, Any] | None = None,
        adapter_name: str | None = None,
        *,
        use_base_model: bool = False,
    ) -> Iterator[StreamChunk]:
        """The text of one completion of one input, as it is sampled. Between chunks the model stays in its sampling state."""


def to_params(params: SamplingParams | Mapping[str, Any] | None) -> SamplingParams:
    if params is None:
        return SamplingParams()
    return params if isinstance(params, SamplingParams) else SamplingParams.from_dict(dict(params))


def encode_prompt(value: SamplerInput, index: int, template: Template | None) -> InputFeature:
    """An input as a feature with ``input_ids`` and pre-shifted ``labels`` (those given, else all ignored)."""
    if not isinstance(value, Mapping):
        feature: InputFeature = {"input_ids": _plain_list(value)}
    elif "input_ids" in value:
        feature = {**value, "input_ids": _plain_list(value["input_ids"])}
    elif template is None:
        raise DataError(f"prompt {index} is not encoded: this sampler has no template to do it with")
    else:
        try:
            feature = template.encode(value, add_generation_prompt=True)
        except DataError as error:
            raise DataError(f"prompt {index}: {error}") from None
    labels = feature.get("labels")
    feature["labels"] = _plain_list(labels) if labels is not None else [IGNORE_INDEX] * len(feature["input_ids"])
    return feature


def check_prompt(ids: list[int], index: int, vocab_size: int, limit: int | None) -> None:
    """Raises DataError unless ``ids`` are 1 to ``limit`` ids below ``vocab_size``."""
    if not ids:
        raise DataError(f"prompt {index} is empty: a prompt needs at least one token")
    for position, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < vocab_size:
            raise DataError(f"prompt {index}, position {position}: {token!r} is not a token id (0 to {vocab_size - 1})")
    if limit is not None and len(ids) > limit:
        raise DataError(f"prompt {index} has {len(ids)} tokens, the model reads at most {limit}")


def extend_feature(prompt: InputFeature, tokens: list[int]) -> InputFeature:
    """The prompt with the sampled tokens behind it, these as labels: labels[t] is the target of position t."""
    ids = prompt["input_ids"]
    input_ids = [*ids, *tokens]
    labels = [*prompt["labels"][: len(ids) - 1], *tokens, IGNORE_INDEX] if tokens else list(prompt["labels"])
    positions = list(range(len(input_ids)))
    return {
        **prompt, "input_ids": input_ids, "labels": labels, "attention_mask": [1] * len(input_ids),
        "position_ids": positions, "length": len(input_ids),
    }  # fmt: skip


def _plain_list(values: Any) -> list[int]:
    return values.tolist() if hasattr(values, "tolist") else list(values)
