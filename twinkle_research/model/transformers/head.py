"""Where a transformers model ends and its vocabulary projection begins, and what it does to the logits after that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from twinkle_research.errors import ConfigError
from twinkle_research.model.head import LogitTransform

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PROBE_LOGIT_STD = 15.0  # large enough that a softcap shows


@dataclass
class Anatomy:
    """The parts of a causal language model. ``body`` maps token ids to hidden states, ``head`` hidden states to logits."""

    body: nn.Module
    head: nn.Module
    transform: LogitTransform

    @classmethod
    def of(cls, model: PreTrainedModel) -> Anatomy:
        """Takes ``model`` apart and checks on a few tokens that its parts give its own logits.

        Raises ConfigError, naming the architecture, where they do not: it does something that this code does not know.
        """
        name = type(model).__name__
        head = model.get_output_embeddings()
        body = model.base_model
        if not isinstance(head, nn.Linear) or body is model:
            raise ConfigError(
                f"model {name} has no separate body and linear output projection: it is not a causal language model"
            )
        return cls(body, head, _find_transform(model, body, head))


@torch.no_grad()
def _find_transform(model: PreTrainedModel, body: nn.Module, head: nn.Linear) -> LogitTransform:
    hidden, entering, logits = _probe(model, body, head)
    name = type(model).__name__
    if entering.shape != hidden.shape or not torch.equal(entering, hidden):
        raise ConfigError(
            f"model {name} changes its hidden states before the output projection; this backend does not support that"
        )
    if logits.shape[-1] != head.weight.shape[0]:
        raise ConfigError(f"model {name} returns {logits.shape[-1]} logits for a projection of {head.weight.shape[0]} rows")
    gain = _probe_gain(head, hidden)
    raw = (torch.nn.functional.linear(hidden * gain, head.weight, head.bias)).double()
    tolerance = 1e-4 if hidden.dtype in (torch.float32, torch.float64) else 3e-2
    for transform in _candidates(model.config.get_text_config()):
        expected = raw * transform.scale
        if transform.softcap is not None:
            expected = torch.tanh(expected / transform.softcap) * transform.softcap
        if (expected - logits).norm() <= tolerance * logits.norm():
            return transform
    raise ConfigError(f"model {name} changes its logits in a way that this backend does not know (not a scale, not a softcap)")


def _probe_gain(head: nn.Linear, hidden: Tensor) -> float:
    logits = torch.nn.functional.linear(hidden, head.weight).float()
    return float(PROBE_LOGIT_STD / logits.std().clamp(min=1e-6))


def _probe(model: PreTrainedModel, body: nn.Module, head: nn.Linear) -> tuple[Tensor, Tensor, Tensor]:
    """(what the body returns, what enters the head, the model's logits once that was multiplied by the gain)."""
    seen: dict[str, Tensor] = {}

    def after_body(module: nn.Module, args: Any, output: Any) -> None:
        seen["hidden"] = output[0]

    def before_head(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        seen["entering"] = args[0]
        return (args[0] * _probe_gain(head, args[0]),)

    was_training = model.training
    model.eval()
    hooks = [body.register_forward_hook(after_body), head.register_forward_pre_hook(before_head)]
    try:
        ids = torch.arange(4, device=head.weight.device)[None] % head.weight.shape[0]
        logits = model(input_ids=ids, use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
        model.train(was_training)
    if len(seen) != 2:
        raise ConfigError(f"model {type(model).__name__} does not call its body and its output projection as modules")
    return seen["hidden"], seen["entering"], logits.double()


def _candidates(config: Any) -> list[LogitTransform]:
    """What the config may mean, the most specific first. Architectures spell the scale differently (and its inverse)."""
    values = config.to_dict()
    scales = [1.0]
    for key in ("logit_scale", "logits_scaling", "lm_head_multiplier"):
        value = values.get(key)
        if isinstance(value, (int, float)) and value not in (0, 1):
            scales = [float(value), 1.0 / value, *scales]
    caps = [cap for cap in (values.get("final_logit_softcapping"),) if cap]
    return [LogitTransform(scale, cap) for cap in [*caps, None] for scale in scales]
