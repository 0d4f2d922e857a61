"""The vocabulary that all parts share: messages, features, sampling requests and their results.

No torch here: clients and the config layer import this module. Names and fields follow Twinkle's.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, TypedDict

IGNORE_INDEX = -100  # label of a position that is not trained


class FunctionCall(TypedDict, total=False):
    name: str
    arguments: dict[str, Any] | str


class ToolCall(TypedDict, total=False):
    id: str
    type: str
    function: FunctionCall


class Message(TypedDict, total=False):
    """One turn. ``role`` is system, user, assistant or tool."""

    role: str
    content: str | list[dict[str, Any]] | None
    tool_calls: list[ToolCall]
    tool_call_id: str
    reasoning_content: str


class Trajectory(TypedDict, total=False):
    """A conversation and what a rollout adds to it. ``user_data``: (name, value) of the row's other columns."""

    messages: list[Message]
    tools: list[dict[str, Any]]
    user_data: list[list[Any]]
    completion: str  # text of the last answer, without the token that stopped it
    stop_reason: str
    num_tokens: int  # of the last answer
    row: str  # where it came from, as in InputFeature


class InputFeature(TypedDict, total=False):
    """One encoded row. All lists have length ``length``.

    ``labels`` are pre-shifted: ``labels[t]`` is the target of ``logits[t]``; IGNORE_INDEX is not trained.
    ``sample_index`` numbers the row within its optimizer step (it keys dropout); the data loader sets it.
    ``row`` says where the row came from, for error messages: "file:line" or "dataset[i]".
    Rows that were sampled say from which distribution: ``temperature``, and ``kept_ids``, for each trained position the
    token ids that top-k and top-p left (None: all). Log-probabilities are then those of that distribution.
    ``dropout_step`` keys dropout in place of the optimizer step, so that the passes over one rollout share their masks.
    """

    input_ids: list[int]
    labels: list[int]
    attention_mask: list[int]
    position_ids: list[int]
    length: int
    sample_index: int
    row: str
    temperature: float
    kept_ids: list[list[int]] | None
    dropout_step: int


@dataclass
class SamplingParams:
    """What is asked of a sampler.

    ``top_k=-1`` and ``top_p=1.0`` switch filtering off. ``logprobs=n`` returns n entries a token, the sampled
    token first. ``max_tokens=0`` scores the prompt only. ``temperature=0`` is greedy.
    """

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    num_samples: int = 1

    def __post_init__(self) -> None:
        checks = [
            (math.isfinite(self.temperature) and self.temperature >= 0, f"temperature must be >= 0, got {self.temperature}"),
            (0 < self.top_p <= 1, f"top_p must be in (0, 1], got {self.top_p}"),
            (self.top_k == -1 or self.top_k >= 1, f"top_k must be -1 or >= 1, got {self.top_k}"),
            (self.repetition_penalty > 0, f"repetition_penalty must be > 0, got {self.repetition_penalty}"),
            (self.num_samples >= 1, f"num_samples must be >= 1, got {self.num_samples}"),
        ]
        for name in ("max_tokens", "logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            checks.append((value is None or value >= 0, f"{name} must be >= 0, got {value}"))
        for ok, message in checks:
            if not ok:
                raise ValueError(message)

    @property
    def filters(self) -> bool:
        """Whether tokens are drawn from a part of the vocabulary."""
        return self.temperature > 0 and (self.top_k != -1 or self.top_p < 1)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> SamplingParams:
        """From a plain dict; ``max_new_tokens`` is read as ``max_tokens``; an unknown key is an error."""
        values = dict(values)
        if "max_new_tokens" in values:
            values["max_tokens"] = values.pop("max_new_tokens")
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ValueError(f"unknown sampling parameter {unknown[0]!r}; valid: {', '.join(sorted(known))}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class SampledSequence:
    """One completion. ``logprobs[t]`` lists (token id, logprob) pairs, the sampled token first."""

    stop_reason: Literal["length", "stop", "abort", "error"]
    tokens: list[int]
    logprobs: list[list[tuple[int, float]]] | None = None
    decoded: str | None = None
    new_input_feature: InputFeature | None = None
    kept: list[list[int]] | None = None  # per token the ids that top-k and top-p left, ascending; None: nothing was filtered


@dataclass
class SampleResponse:
    """All completions of one prompt."""

    sequences: list[SampledSequence]
    prompt_token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[float | None] | None = None
    topk_prompt_logprobs: list[list[tuple[int, float]] | None] | None = None
