"""TRL 1.16's own code, called with log-probabilities instead of a model: its loss, and what it makes of rewards."""

import importlib
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from twinkle_research.loss.base import LossInputs, TokenScores

VERSION = "1.16"
MISSING = f"needs trl: pip install --no-deps trl=={VERSION}.0"


def trl_module(name: str, package: str = "trainer") -> ModuleType:
    """Skips the test where TRL is not installed. Without vLLM, whose import takes longer than all tests of a file."""
    trl = pytest.importorskip("trl", reason=MISSING)
    assert trl.__version__.startswith(f"{VERSION}."), f"the comparison is with trl {VERSION}, here is {trl.__version__}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.import_module("trl.import_utils"), "is_vllm_available", lambda *args, **kwargs: False)
        return importlib.import_module(f"trl.{package}.{name}")


@contextmanager
def in_float64() -> Iterator[None]:
    """TRL makes some of its tensors from plain numbers, in the default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Model(torch.nn.Linear):
    is_gradient_checkpointing = False


class Accelerator:
    """One process."""

    device = torch.device("cpu")
    num_processes = 1
    process_index = 0
    sync_gradients = True

    def gather(self, value: Any) -> Any:
        return value

    def reduce(self, value: Tensor, reduction: str) -> Tensor:
        return value

    def unwrap_model(self, model: Any) -> Any:
        return model


def trl_loss(scores: TokenScores, inputs: LossInputs, loss_type: str, **settings: Any) -> tuple[Tensor, dict[str, float]]:
    """The loss of ``GRPOTrainer`` for one optimizer step of one micro-batch, and its metrics.

    ``settings``: names of GRPOConfig; ``importance_sampling_ratio`` is what its trainer hands to its loss.
    """
    options = {
        "importance_sampling_level": "token", "epsilon": 0.2, "epsilon_high": None, "delta": None, "beta": 0.0,
        "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05, "off_policy_mask_threshold": None, "entropy_coef": 0.0,
        "max_completion_length": 16, "importance_sampling_ratio": None,
    } | settings  # fmt: skip
    trainer = object.__new__(trl_module("grpo_trainer").GRPOTrainer)
    ratio = options.pop("importance_sampling_ratio")
    vars(trainer).update(
        aux_loss_enabled=False, top_entropy_quantile=1.0, use_vllm=ratio is not None, vllm_importance_sampling_correction=True,
        off_policy_mask_threshold=options["off_policy_mask_threshold"], loss_type=loss_type, beta=options["beta"],
        importance_sampling_level=options["importance_sampling_level"], epsilon_low=options["epsilon"],
        epsilon_high=options["epsilon"] if options["epsilon_high"] is None else options["epsilon_high"],
        max_completion_length=options["max_completion_length"], entropy_coef=options["entropy_coef"],
        _entropy_bonus_enabled=options["entropy_coef"] > 0, use_adaptive_entropy=False,
        args=SimpleNamespace(**options, use_bias_correction_kl=False, steps_per_generation=1),
        model=SimpleNamespace(training=True), accelerator=Accelerator(), current_gradient_accumulation_steps=1,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (scores.logprobs, scores.entropy, None),
    )  # fmt: skip
    ids = torch.zeros_like(inputs.mask, dtype=torch.long)
    batch = {
        "prompt_ids": ids[:, :1], "prompt_mask": torch.ones_like(ids[:, :1]), "completion_ids": ids,
        "completion_mask": inputs.mask, "advantages": inputs.advantages, "old_per_token_logps": inputs.old_logprobs,
        "ref_per_token_logps": inputs.ref_logprobs, "num_items_in_batch": inputs.mask.sum(),
        "importance_sampling_ratio": ratio,
    }  # fmt: skip
    if inputs.sampler_logprobs is not None:
        batch["sampling_per_token_logps"] = inputs.sampler_logprobs
    with in_float64():
        loss = trainer._compute_loss(trainer.model, batch)
    return loss, {name: values[-1] for name, values in trainer._metrics["train"].items()}


def trl_rloo_loss(scores: TokenScores, inputs: LossInputs, epsilon: float) -> Tensor:
    """The loss of ``RLOOTrainer``."""
    trainer = object.__new__(trl_module("rloo_trainer").RLOOTrainer)
    vars(trainer).update(
        aux_loss_enabled=False, epsilon_low=epsilon, epsilon_high=epsilon, model=SimpleNamespace(training=True),
        accelerator=Accelerator(), _metrics=defaultdict(lambda: defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (scores.logprobs, scores.entropy, None),
    )  # fmt: skip
    ids = torch.zeros_like(inputs.mask, dtype=torch.long)
    batch = {
        "prompt_ids": ids[:, :1], "prompt_mask": torch.ones_like(ids[:, :1]), "completion_ids": ids,
        "completion_mask": inputs.mask, "advantages": inputs.advantages[:, 0],
        "old_logps": (inputs.old_logprobs * inputs.mask).sum(1),
    }  # fmt: skip
    return trainer._compute_loss(trainer.model, batch)


def trl_experience(trainer_name: str, rewards: list[float | None], inputs: LossInputs, **settings: Any) -> dict[str, Tensor]:
    """What ``_generate_and_score_completions`` makes of rewards and log-probabilities: advantages, and the weights that
    correct for the sampler. ``inputs.old_logprobs`` are the trainer's, rows in groups."""
    module, lengths = trl_module(f"{trainer_name.lower()}_trainer"), inputs.mask.sum(1).int().tolist()
    options = {
        "num_generations": 2, "scale_rewards": "group", "normalize_advantages": False, "beta": 0.0, "mode": None,
        "clip_min": None, "clip_max": 3.0,
    } | settings  # fmt: skip
    corrected = options["mode"] is not None
    sampled = [row[:n].tolist() for row, n in zip(inputs.sampler_logprobs, lengths, strict=True)] if corrected else None
    rows = [[7] * n for n in lengths]
    trainer = object.__new__(getattr(module, f"{trainer_name}Trainer"))
    scored = iter([inputs.old_logprobs, inputs.ref_logprobs])
    generated = ([[1]] * len(rows), rows, None, ["x"] * len(rows), sampled, {}, None, None)
    if trainer_name == "RLOO":
        generated = ([[1]] * len(rows), rows, ["x"] * len(rows))
    vars(trainer).update(
        args=SimpleNamespace(
            per_device_train_batch_size=len(rows), steps_per_generation=1, gradient_accumulation_steps=2,
            gradient_checkpointing_kwargs=None,
        ),
        accelerator=Accelerator(), model=Model(1, 1), ref_model=Model(1, 1), _is_vlm=False, num_iterations=3,
        environment_factories=None, environments=None, tools=[], images=None, _tokenizer=SimpleNamespace(pad_token_id=0),
        eos_token_ids=[7], eos_token_id=7, pad_token_id=0, pad_to_multiple_of=None, mask_truncated_completions=False,
        chat_template_kwargs={}, beta=options["beta"], reward_clip_range=None, num_generations=options["num_generations"],
        normalize_advantages=options["normalize_advantages"], scale_rewards=options["scale_rewards"],
        multi_objective_aggregation="sum_then_normalize", reward_weights=torch.ones(1, dtype=torch.float64),
        reward_funcs=[len], reward_func_names=["reward"], use_vllm=corrected, vllm_importance_sampling_correction=corrected,
        vllm_importance_sampling_mode=options["mode"], vllm_importance_sampling_clip_min=options["clip_min"],
        vllm_importance_sampling_clip_max=options["clip_max"], log_multimodal=False, _pending_extra_logs={}, _pending_metrics={},
        _metrics=defaultdict(lambda: defaultdict(list)), _is_quantized_model=False,
        _logs=defaultdict(deque) | {"rewards": defaultdict(deque), "extra": defaultdict(deque)},
        state=SimpleNamespace(num_input_tokens_seen=0),
        _generate=lambda prompts: generated,
        _calculate_rewards=lambda *args: torch.tensor([[float("nan") if r is None else r] for r in rewards], dtype=torch.float64),
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (next(scored), None, None),
    )  # fmt: skip
    with in_float64():
        return trainer._generate_and_score_completions([{"prompt": "p"} for _ in rows])
