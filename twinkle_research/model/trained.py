"""What every backend's model has that does not depend on how it computes: one ``Trained`` for each adapter, with its loss,
optimizer, schedule, accumulation window and metrics."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from twinkle_research.data_format import InputFeature
from twinkle_research.errors import UserError, nearest
from twinkle_research.loss import resolve_loss
from twinkle_research.model.base import Result, TrainConfigs, TwinkleModel
from twinkle_research.model.optimizer import optimizer_spec
from twinkle_research.model.training import TrainingState
from twinkle_research.processor.base import InputProcessor
from twinkle_research.processor.features import as_features
from twinkle_research.symbols import construct, load_symbol

if TYPE_CHECKING:
    from twinkle_research.model.passes import Trained
    from twinkle_research.trainer.config import TrainConfig


class TrainedModel(TwinkleModel):
    """``_runs``: what is trained, by adapter name; "" stands for all weights."""

    model_id: str
    _runs: dict[str, Trained]

    @abstractmethod
    def _begin(self, run: Trained, gradient_accumulation_steps: int = 1) -> TrainingState:
        """Finds the parameters of ``run`` and makes its training state."""

    @abstractmethod
    def adapter_json(self, adapter_name: str) -> dict[str, Any]:
        """The content of its adapter_config.json."""

    @abstractmethod
    def _trainable_parameters(self, run: Trained) -> int:
        """Of the whole model, wherever they lie."""

    @abstractmethod
    def _total_parameters(self) -> int:
        """The same, those that are not trained included."""

    # --- what is trained ----------------------------------------------------------------------------------------

    @property
    def adapter_name(self) -> str | None:
        """The only adapter; None where all weights are trained."""
        return self._run(None).name or None

    def _run(self, adapter_name: str | None) -> Trained:
        if not adapter_name and len(self._runs) == 1:
            return next(iter(self._runs.values()))
        if not adapter_name:
            if not self._runs:
                raise UserError("the model has no adapter yet: call add_adapter_to_model first")
            raise UserError(f"which adapter? The model has {', '.join(self._runs)}: give adapter_name")
        if adapter_name not in self._runs:
            known = [name for name in self._runs if name]
            raise UserError(f"no adapter {adapter_name!r}; {nearest(adapter_name, known) if known else 'the model has none'}")
        return self._runs[adapter_name]

    def trained(self, adapter_name: str | None = None) -> Trained:
        """The same, with its training begun."""
        run = self._run(adapter_name)
        if run.training is None:
            self._begin(run)
        return run

    def training_state(self, adapter_name: str | None = None) -> TrainingState:
        """Its window, optimizer, schedule and metrics."""
        return self.trained(adapter_name).training

    def start_training(self, gradient_accumulation_steps: int = 1) -> TrainingState:
        """Begins to train all weights. Implied by ``set_optimizer`` and the first pass."""
        run = self._run(None)
        if run.training is not None:
            raise UserError("start_training must come first and once")
        return self._begin(run, gradient_accumulation_steps)

    # --- set-up -------------------------------------------------------------------------------------------------

    def configure(self, cfg: TrainConfig) -> None:
        """Adds the adapter that ``cfg`` describes and sets its processor: of a model that has neither."""
        if cfg.adapter.name == "lora":
            self.add_adapter_to_model("default", cfg.adapter)
        trainer = cfg.trainer
        self.set_processor(
            InputProcessor("right", trainer.micro_batch_size, trainer.micro_batch_tokens, packing=cfg.data.packing)
        )

    def set_template(self, template_cls: Any, adapter_name: str | None = None, **kwargs: Any) -> None:
        """A Template, its class or its name; ``model_id`` defaults to the model's own."""
        template = load_symbol(template_cls, "twinkle_research.template", "template")
        own = {"model_id": self.model_id} if isinstance(template, type) and "tokenizer" not in kwargs else {}
        template = construct(template, "set_template", **(own | kwargs))
        self._run(adapter_name).template = template

    def set_loss(self, loss_cls: Any, adapter_name: str | None = None, **kwargs: Any) -> None:
        """A Loss, its class or its name."""
        self._run(adapter_name).loss = resolve_loss(loss_cls, **kwargs)

    def set_optimizer(self, optimizer_cls: Any, adapter_name: str | None = None, **kwargs: Any) -> None:
        """An optimizer config, a name (AdamW, Adam, SGD, Muon, default) or a class of torch.optim of that name."""
        self.training_state(adapter_name).set_optimizer(optimizer_spec(optimizer_cls, **kwargs))

    def set_lr_scheduler(
        self, scheduler_cls: Any, total_steps: int | None = None, adapter_name: str | None = None, **kwargs: Any
    ) -> None:
        """A scheduler config, a name of model.schedule.SCHEDULES or a function of the step; see build_schedule."""
        self.training_state(adapter_name).set_schedule(scheduler_cls, total_steps, **kwargs)

    def add_metric(
        self, metric_cls: Any, is_training: bool | None = None, adapter_name: str | None = None, **kwargs: Any
    ) -> None:
        """``is_training=None``: for training and for evaluation."""
        for training in (True, False) if is_training is None else (is_training,):
            self.training_state(adapter_name).meters[training].add(metric_cls, **kwargs)

    # --- steps --------------------------------------------------------------------------------------------------

    def count(self, features: Sequence[InputFeature], adapter_name: str | None = None) -> int:
        return int(self.shares.all_reduce_sum(self._run(adapter_name).loss.count(as_features(features))))

    def clip_grad_norm(self, max_grad_norm: float | None = 1.0, norm_type: float = 2, adapter_name: str | None = None) -> float:
        """The global norm before clipping, at the end of an accumulation window; 0.0 inside one."""
        return self.training_state(adapter_name).clip_grad_norm(max_grad_norm, norm_type)

    def step(self, adapter_name: str | None = None) -> None:
        """Updates the weights, at the end of an accumulation window. Gradients stay until ``zero_grad``."""
        self.training_state(adapter_name).step()
        self._run(adapter_name).first_sample = 0

    def zero_grad(self, adapter_name: str | None = None) -> None:
        self.training_state(adapter_name).zero_grad()

    def lr_step(self, adapter_name: str | None = None) -> None:
        self.training_state(adapter_name).lr_step()

    def clip_grad_and_step(
        self, max_grad_norm: float | None = 1.0, norm_type: float = 2, adapter_name: str | None = None
    ) -> None:
        self._run(adapter_name).first_sample = 0
        self.training_state(adapter_name).clip_grad_and_step(max_grad_norm, norm_type)

    def finish_window(self, max_grad_norm: float | None = 1.0, adapter_name: str | None = None) -> None:
        self.training_state(adapter_name).finish_window(max_grad_norm)

    def calculate_metric(self, is_training: bool, adapter_name: str | None = None) -> Result:
        return Result(self.training_state(adapter_name).meters[is_training].calculate(self.shares.gather_objects))

    def get_train_configs(self, adapter_name: str | None = None) -> TrainConfigs:
        run = self.trained(adapter_name)
        training = run.training
        return TrainConfigs(
            model_id=self.model_id,
            adapter_name=run.name,
            adapter=self.adapter_json(run.name) if run.name else None,
            loss=type(run.loss).__name__,
            optimizer=training.optimizer.spec.describe() if training.optimizer else None,
            scheduler=training.schedule.describe(),
            gradient_accumulation_steps=training.gradient_accumulation_steps,
            trainable_parameters=self._trainable_parameters(run),
            total_parameters=self._total_parameters(),
        )
