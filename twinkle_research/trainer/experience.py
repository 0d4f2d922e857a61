"""From sampled completions to what an optimizer step takes: old and reference log-probabilities, advantages, minibatches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from twinkle_research.advantage.base import Rollouts
from twinkle_research.data_format import IGNORE_INDEX, InputFeature
from twinkle_research.dataloader.balance import deal
from twinkle_research.dataset.order import keyed_permutation
from twinkle_research.rollout.batch import Completion, RolloutBatch

if TYPE_CHECKING:
    from twinkle_research.advantage.base import Advantage
    from twinkle_research.model.base import TwinkleModel
    from twinkle_research.trainer.timing import StepClock


class Experience:
    """``batch_size``: prompts in an optimizer step, of ``prompts_per_step`` in a rollout. ``reference_every``: rollouts after
    which a refreshed reference follows the policy; None: it does not. ``replay_dropout``: score and train with the same
    dropout masks."""

    def __init__(
        self,
        model: TwinkleModel,
        clock: StepClock,
        advantage: Advantage,
        *,
        batch_size: int,
        prompts_per_step: int,
        inner_epochs: int,
        seed: int,
        needs_reference: bool,
        needs_values: bool,
        reference_every: int | None,
        replay_dropout: bool,
        log_completions: int,
    ) -> None:
        self.model = model
        self.clock = clock
        self.advantage = advantage  # of the whole rollout
        self.prompts_per_step = prompts_per_step
        self.steps_per_epoch = prompts_per_step // batch_size
        self.steps_per_rollout = inner_epochs * self.steps_per_epoch
        self.seed = seed
        self.needs_reference = needs_reference
        self.needs_values = needs_values
        self.reference_every = reference_every
        self.replay_dropout = replay_dropout
        self.log_completions = log_completions

    # --- once a rollout -----------------------------------------------------------------------------------------

    def complete(self, batch: RolloutBatch) -> None:
        """Numbers the completions and adds what the trainer's model says of them, and their advantages. Collective."""
        for number, completion in enumerate(batch.completions):
            completion.feature = {**completion.feature, "sample_index": number}
            if self.replay_dropout:
                completion.feature["dropout_step"] = batch.step
        with self.clock.part("score"):
            if self.steps_per_rollout > 1 or self.needs_values or "old_logps" in self.advantage.needs:
                scores = self._scored(batch.completions, lambda rows: self.model.policy_scores(rows, dropout=self.replay_dropout))
                _keep(batch.completions, "old_logprobs", scores["logps"])
                if self.needs_values:
                    _keep(batch.completions, "old_values", scores["values"])
            if self.needs_reference:
                self._refresh_reference(batch)
                logps = self._scored(batch.completions, lambda rows: {"logps": self.model.reference_logps(rows)})["logps"]
                _keep(batch.completions, "ref_logprobs", logps)
        self._assign_advantages(batch)

    def _assign_advantages(self, batch: RolloutBatch) -> None:
        found = self.advantage.score(
            Rollouts(
                rewards=[c.reward for c in batch.completions],
                num_generations=batch.num_generations,
                lengths=[c.num_trained for c in batch.completions],
                old_logps=_of_all(batch, "old_logprobs"),
                ref_logps=_of_all(batch, "ref_logprobs"),
                values=_of_all(batch, "old_values"),
            )
        )
        returns = found.returns or [None] * len(batch.completions)
        for completion, advantages, own in zip(batch.completions, found.advantages, returns, strict=True):
            spread = isinstance(advantages, float)  # one for the whole answer
            completion.advantages = [advantages] * completion.num_trained if spread else advantages
            completion.returns = own

    def _refresh_reference(self, batch: RolloutBatch) -> None:
        every = self.reference_every
        if every is not None and batch.step and (batch.step // self.steps_per_rollout) % every == 0:
            self.model.refresh_reference()

    def _scored(self, completions: Sequence[Completion], score: Any) -> dict[str, list[list[float]]]:
        """What ``score`` says of each completion; each rank scores its share, all get everything."""
        own = self._own(completions)
        found = score([completions[i].feature for i in own])
        shares = self.model.shares.gather_objects((own, found))
        result: dict[str, list[list[float]]] = {name: [[]] * len(completions) for name in found}
        for numbers, values in shares:
            for name, rows in values.items():
                for i, row in zip(numbers, rows, strict=True):
                    result[name][i] = row
        return result

    def _own(self, completions: Sequence[Completion]) -> list[int]:
        rank, size = self.model.data_parallel
        return deal([len(c.feature["input_ids"]) for c in completions], size)[rank]

    # --- once a step --------------------------------------------------------------------------------------------

    def minibatch(self, batch: RolloutBatch) -> list[Completion]:
        """The completions of the next optimizer step: whole groups, in an order of each inner epoch's own. A rollout that has
        not become full (dynamic sampling) is spread over its steps evenly."""
        epoch, part = divmod(batch.done, self.steps_per_epoch)
        groups = batch.groups
        order = keyed_permutation(len(groups), self.seed, "minibatches", batch.step, epoch)
        mine = np.array_split(order, self.steps_per_epoch)[part]
        return [completion for i in sorted(mine.tolist()) for completion in groups[i]]

    def share(self, completions: Sequence[Completion]) -> tuple[list[InputFeature], dict[str, Any]]:
        """This rank's share: features, and the loss inputs that belong to them."""
        own = [completions[i] for i in self._own(completions)]
        inputs: dict[str, Any] = {
            "advantages": [c.advantages for c in own],
            "sampler_logps": [c.logprobs[: c.num_trained] for c in own],
        }
        for name, field in (
            ("old_logps", "old_logprobs"), ("ref_logps", "ref_logprobs"), ("old_values", "old_values"), ("returns", "returns"),
        ):  # fmt: skip
            values = [getattr(c, field) for c in own]
            if completions and getattr(completions[0], field) is not None:
                inputs[name] = values
        return [c.feature for c in own], inputs

    def shown(self, batch: RolloutBatch) -> list[dict[str, Any]]:
        """Some completions as rows for samples.jsonl: of as many prompts as possible."""
        ordered = sorted(batch.completions, key=lambda c: (c.k, c.prompt))[: self.log_completions]
        return [shown(c) for c in sorted(ordered, key=lambda c: (c.prompt, c.k))]


def shown(completion: Completion) -> dict[str, Any]:
    """A row of samples.jsonl."""
    row = {"prompt": completion.prompt_text, "completion": completion.text, "stop_reason": completion.stop_reason}
    if completion.answer is not None:
        row["answer"] = completion.answer
    row["reward"] = completion.reward
    if len(completion.rewards) > 1:
        row |= {f"reward/{name}": value for name, value in completion.rewards.items()}
    if completion.advantages or completion.reward is None:
        row["advantage"] = sum(completion.advantages) / max(1, len(completion.advantages))
    return row


def _of_all(batch: RolloutBatch, field: str) -> list[list[float]] | None:
    values = [getattr(completion, field) for completion in batch.completions]
    return None if any(value is None for value in values) else values


def _keep(completions: Sequence[Completion], field: str, rows: Sequence[Sequence[float]]) -> None:
    """Keeps the values at trained positions of rows that are aligned with the labels."""
    for completion, row in zip(completions, rows, strict=True):
        labels = completion.feature["labels"]
        setattr(completion, field, [value for value, label in zip(row, labels, strict=True) if label != IGNORE_INDEX])
