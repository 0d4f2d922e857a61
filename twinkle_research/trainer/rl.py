"""The reinforcement loop: generate, score, advantage, train, sync."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from twinkle_research.data_format import SamplingParams
from twinkle_research.rollout.batch import Completion, RolloutBatch, is_flat, masked, mean_reward, metrics
from twinkle_research.trainer.config import RlTrainerConfig
from twinkle_research.trainer.experience import Experience
from twinkle_research.trainer.loop import TrainingLoop

if TYPE_CHECKING:
    from twinkle_research.checkpoint.format import CheckpointReader
    from twinkle_research.dataset.prompts import PromptDataset
    from twinkle_research.rollout.base import Rollout
    from twinkle_research.rollout.config import SingleTurnConfig
    from twinkle_research.sampler.base import Sampler

OPEN_ROLLOUT = "rollouts/open.json"


@dataclass
class RlTrainer(TrainingLoop):
    """One rollout gives ``inner_epochs`` x prompts_per_step / batch_size optimizer steps."""

    cfg: RlTrainerConfig
    rollout_cfg: SingleTurnConfig
    prompts: PromptDataset
    sampler: Sampler
    rollout: Rollout
    experience: Experience
    params: SamplingParams

    def __post_init__(self) -> None:
        super().__post_init__()
        self.consumed = 0  # prompts sampled since the start, over all epochs
        self.batch: RolloutBatch | None = None  # with steps still to make

    def fit(self) -> dict[str, Any]:
        self.begin()
        while self.step < self.total_steps:
            if self.batch is None:
                self.batch = self.generate()
            batch = self.batch
            completions = self.experience.minibatch(batch)
            features, loss_inputs = self.experience.share(completions)
            row = metrics(completions, batch) | self.optimize(features, **loss_inputs)
            batch.done += 1
            if batch.done == self.experience.steps_per_rollout:
                self.batch = None
            self.finish_step(row, tokens=sum(f["length"] for f in features))
        return self.result()

    def generate(self) -> RolloutBatch:
        """A full rollout with its advantages. Collective."""
        self.sync()
        wanted = self.rollout_cfg.prompts_per_step
        groups, counts, n = [], Counter(), self.params.num_samples
        limit = wanted * (self.rollout_cfg.max_oversampling or 1)
        while len(groups) < limit and sum(map(self._is_used, groups)) < wanted:
            missing = wanted - sum(map(self._is_used, groups))
            rows = self.prompts.take(self.consumed, min(missing, limit - len(groups)))
            played = self.rollout(self.prompts, rows, self.params, step=self.step, purpose="rollout", first=len(groups))
            counts.update(played.counts)
            self.consumed += len(rows)
            groups += [played.completions[i : i + n] for i in range(0, len(played.completions), n)]
        self.sampler.sleep()
        used = [completion for group in groups if self._is_used(group) for completion in group]
        if len(used) < wanted * n:
            self.tracker.message(
                f"step {self.step + 1}: of {len(groups)} prompts only {len(used) // n} have answers with different rewards; "
                f"{wanted} were wanted (rollout.max_oversampling={self.rollout_cfg.max_oversampling})"
            )
        used = [replace(c, feature=masked(c.feature)) if self._is_masked(c) else c for c in used]
        if used and not any(c.reward is not None for c in used):
            self.tracker.message(f"step {self.step + 1}: none of {len(used)} completions could be scored")
        elif used and all(map(self._is_masked, used)):
            self.tracker.message(
                f"step {self.step + 1}: all {len(used)} completions were cut off at sampler.max_tokens or could not be scored; "
                "rollout.mask_truncated leaves them out, so nothing is trained"
            )
        batch = RolloutBatch(self.step, n, used, len(groups), sum(map(is_flat, groups)), mean_reward(groups), dict(counts))
        self.experience.complete(batch)
        # They belong to the step that trains on them first: a resume cuts the records back to the step of its checkpoint.
        self.tracker.log_samples(self.step + 1, self.experience.shown(batch))
        return batch

    def _is_masked(self, completion: Completion) -> bool:
        """Whether it is left out of the loss, numerator and denominator: nobody could score it, or it was cut off."""
        return completion.reward is None or (self.rollout_cfg.mask_truncated and completion.truncated)

    def _is_used(self, group: list[Completion]) -> bool:
        return self.rollout_cfg.max_oversampling is None or not is_flat(group)

    def sync(self) -> None:
        """The sampler gets the present weights, once a step."""
        self.sampler.wake_up()
        if self.sampler.version != self.step:
            with self.clock.part("sync"):
                self.sampler.sync(self.model, self.step)

    def evaluate(self, step: int) -> dict[str, float]:
        self.sync()
        found = super().evaluate(step)
        self.sampler.sleep()
        return found

    # --- state --------------------------------------------------------------------------------------------------

    def data_state(self) -> dict[str, Any]:
        return {"epoch": self.consumed // len(self.prompts), "consumed_train_samples": self.consumed}

    def open_files(self) -> dict[str, Any]:
        return {} if self.batch is None else {OPEN_ROLLOUT: self.batch.to_json()}

    def load_data_state(self, state: dict[str, Any], reader: CheckpointReader) -> None:
        self.consumed = state["consumed_train_samples"]
        if reader.has(OPEN_ROLLOUT):
            self.batch = RolloutBatch.from_json(reader.json(OPEN_ROLLOUT))
