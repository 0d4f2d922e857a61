"""The parts of a reinforcement run: its prompts, its sampler, its rewards, its evaluation, its loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twinkle_research.advantage import build_advantage
from twinkle_research.data_format import SamplingParams
from twinkle_research.dataset.prompts import build_prompts
from twinkle_research.errors import DataError
from twinkle_research.loss import build_loss
from twinkle_research.loss.config import LossDropout
from twinkle_research.reward import build_reward
from twinkle_research.rollout.single_turn import SingleTurnRollout
from twinkle_research.sampler.build import build_sampler
from twinkle_research.sampler.stops import unescape
from twinkle_research.trainer.config import ReferenceKind
from twinkle_research.trainer.experience import Experience
from twinkle_research.trainer.rl import RlTrainer
from twinkle_research.trainer.rl_evaluation import RlEvaluation

if TYPE_CHECKING:
    from pathlib import Path

    from twinkle_research.distributed.runtime import Runtime
    from twinkle_research.model.base import TwinkleModel
    from twinkle_research.sampler.base import Sampler
    from twinkle_research.template import Template
    from twinkle_research.trainer.config import TrainConfig
    from twinkle_research.trainer.timing import StepClock


class ReinforcedParts:
    """The prompts are read before the model, so that a bad row costs no loading. Collective."""

    def __init__(self, cfg: TrainConfig, template: Template, runtime: Runtime) -> None:
        self.cfg = cfg
        self.template = template
        self.runtime = runtime
        self.prompts, self.eval_prompts = build_prompts(cfg.data, template, cfg.seed)
        fingerprints = runtime.gather_objects(self.prompts.fingerprint)
        if len(set(fingerprints)) > 1:
            raise DataError("the ranks have different prompts: the files differ between the machines")
        self.fingerprint = fingerprints[0]
        self.scorer = build_reward(cfg.reward)
        for prompts in filter(None, (self.prompts, self.eval_prompts)):
            self.scorer.check(prompts.trajectory(i) for i in range(len(prompts)))
        self.sampler: Sampler | None = None  # made in ``attach``

    def attach(self, model: TwinkleModel, model_folder: Path, clock: StepClock) -> None:
        cfg, trainer, rollout = self.cfg, self.cfg.trainer, self.cfg.rollout
        loss, advantage = build_loss(cfg.loss), build_advantage(cfg.advantage)
        if "values" in loss.needs:
            model.add_value_head()
        model.set_loss(loss)
        needs_reference = bool(loss.beta or advantage.kl_coef)
        if needs_reference:
            model.set_reference(self._reference(model))
        self.params = SamplingParams(
            max_tokens=cfg.sampler.max_tokens, seed=cfg.seed, logprobs=1,
            stop=[unescape(text) for text in cfg.sampler.stop] or None,
            temperature=cfg.sampler.temperature, top_k=cfg.sampler.top_k or -1, top_p=cfg.sampler.top_p,
            num_samples=rollout.num_generations,
        )  # fmt: skip
        self.sampler = build_sampler(cfg, model, self.template, model_folder, self.runtime)
        self.rollout = SingleTurnRollout(self.sampler, self.scorer, self.runtime, clock)
        self.evaluation = RlEvaluation(
            self.rollout, self.eval_prompts, self.params, k=trainer.eval_samples, success=trainer.success_reward,
            shown=trainer.log_completions,
        )  # fmt: skip
        self.experience = Experience(
            model, clock, advantage, batch_size=trainer.batch_size, prompts_per_step=rollout.prompts_per_step,
            inner_epochs=trainer.inner_epochs, seed=cfg.seed, needs_reference=needs_reference,
            needs_values="values" in loss.needs, reference_every=trainer.reference_every,
            replay_dropout=cfg.loss.dropout is LossDropout.replay, log_completions=trainer.log_completions,
        )  # fmt: skip

    def _reference(self, model: TwinkleModel) -> str:
        kind = self.cfg.trainer.reference
        if kind is ReferenceKind.auto:
            return "base" if self.cfg.adapter.name != "none" else "frozen"
        return kind.value

    @property
    def rows_per_epoch(self) -> int:
        return len(self.prompts)

    def steps(self) -> int:
        """Optimizer steps of the whole run; an epoch's last rollout takes its missing prompts from the next epoch."""
        trainer = self.cfg.trainer
        epochs = trainer.epochs if trainer.epochs is not None or trainer.max_steps is not None else 1
        rollouts = None if epochs is None else -(-epochs * len(self.prompts) // self.experience.prompts_per_step)
        limits = [trainer.max_steps, None if rollouts is None else rollouts * self.experience.steps_per_rollout]
        return min(limit for limit in limits if limit is not None)

    def loop(self, **common: Any) -> RlTrainer:
        return RlTrainer(
            **common, rollout_cfg=self.cfg.rollout, prompts=self.prompts, sampler=self.sampler, rollout=self.rollout,
            experience=self.experience, params=self.params,
        )  # fmt: skip

    def close(self) -> None:
        self.scorer.close()
        if self.sampler is not None:
            self.sampler.close()
