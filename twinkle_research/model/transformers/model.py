"""TransformersModel: a causal language model of transformers, trained in full or through a LoRA, alone or with
data parallelism by gradient sums."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from twinkle_research.data_format import IGNORE_INDEX, InputFeature
from twinkle_research.distributed.runtime import Runtime
from twinkle_research.errors import ConfigError, UserError
from twinkle_research.loss import resolve_loss
from twinkle_research.loss.base import Loss, LossOutput, TokenScores
from twinkle_research.metric import CallRecord
from twinkle_research.model.base import Result, TrainConfigs, TwinkleModel
from twinkle_research.model.dropout import DropoutState, key_dropout, zero_functional_dropout
from twinkle_research.model.layout import WHOLE
from twinkle_research.model.optimizer import optimizer_spec
from twinkle_research.model.training import TrainingState
from twinkle_research.model.transformers import lora
from twinkle_research.model.transformers.head import Anatomy
from twinkle_research.model.transformers.loading import DTYPES, load_model, load_skeleton
from twinkle_research.model.transformers.saving import SavingMixin
from twinkle_research.model.transformers.scoring import MicroBatch, Scorer, logps_by_row
from twinkle_research.processor.base import InputProcessor
from twinkle_research.symbols import load_symbol

if TYPE_CHECKING:
    from twinkle_research.checkpoint.stream import TensorFolder
    from twinkle_research.model.transformers.sharding import ShardedModel
    from twinkle_research.template.base import Template
    from twinkle_research.trainer.config import TrainConfig

log = logging.getLogger(__name__)


@dataclass
class _Scored:
    """A micro-batch between forward and backward. ``scores`` and ``output`` are None where nothing is trained."""

    micro: MicroBatch
    features: Sequence[InputFeature]
    scores: TokenScores | None = None
    output: LossOutput | None = None


class TransformersModel(SavingMixin, TwinkleModel):
    """``model_id``: a folder or hub id. ``runtime``: this rank's place among the others; None for a single process.

    Without ``add_adapter_to_model`` all weights are trained. Gradients are sums that are divided at the optimizer step,
    so nothing depends on how a step is cut into calls, micro-batches and ranks.
    """

    def __init__(
        self,
        model_id: str | Path,
        *,
        dtype: str = "float32",
        attention: str = "auto",
        gradient_checkpointing: bool = False,
        device: str | torch.device | None = None,
        logits_chunk: int = 512,
        seed: int = 0,
        runtime: Runtime | None = None,
        sharding: str = "auto",
        trust_remote_code: bool = False,
        revision: str | None = None,
    ) -> None:
        if dtype not in DTYPES:
            raise ConfigError(f"model.dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
        if logits_chunk < 1:
            raise ConfigError(f"backend.logits_chunk must be >= 1, got {logits_chunk}")
        self.model_id = str(model_id)
        self.seed = seed
        self.runtime = runtime or Runtime()
        self.device = torch.device(device) if device is not None else self.runtime.device
        self.dtype = DTYPES[dtype]
        self.logits_chunk = logits_chunk
        options: dict[str, Any] = {
            "dtype": self.dtype, "attention": attention, "device": self.device, "trust_remote_code": trust_remote_code,
            "revision": revision,
        }  # fmt: skip
        self._shards: ShardedModel | None = None
        self._unread: TensorFolder | None = None  # weights that are still to be loaded, once it is known what is trained
        self.module: nn.Module
        if sharding == "fsdp2":
            if self.runtime.world_size == 1:
                raise ConfigError("backend.sharding=fsdp2 splits the model over several processes; this is the only one")
            self.module, self._unread = load_skeleton(model_id, **options)
        else:
            self.module = load_model(model_id, **options)
        for name in zero_functional_dropout(self.module):
            log.warning("dropout of %s is not used: it is not a module, so its masks would not be reproducible", name)
        self.dropout = DropoutState(seed)
        key_dropout(self.module, self.dropout)
        if gradient_checkpointing:
            self.module.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if self._unread is None:
            self._scorer = self._build_scorer()
        self.adapter_name: str | None = None
        self.loss: Loss = resolve_loss("CrossEntropyLoss")
        self.processor = InputProcessor()
        self.template: Template | None = None
        self._training: TrainingState | None = None
        self._scored: list[_Scored] = []
        self._first_sample = 0  # numbers rows that come without a sample_index

    def _build_scorer(self) -> Scorer:
        anatomy = Anatomy.of(self.module)
        return Scorer(
            self.module, anatomy.body, anatomy.transform, self.device, torch.promote_types(self.dtype, torch.float32),
            self.logits_chunk, self.dropout, self.module.get_input_embeddings().weight.shape[0],
        )  # fmt: skip

    def _shard(self, trained: bool) -> None:
        """With sharding=fsdp2, once: cuts the model and loads this rank's part of it. Collective."""
        if self._unread is not None:
            from twinkle_research.model.transformers.sharding import ShardedModel

            folder, self._unread = self._unread, None
            self._shards = ShardedModel(self.module, self.runtime, self.dtype, folder, trained=trained)
            self._scorer = self._build_scorer()
            self._shards.release()

    @classmethod
    def from_config(cls, cfg: TrainConfig, folder: str | Path, runtime: Runtime) -> TransformersModel:
        """The model that ``cfg`` describes, its weights from ``folder``, its adapter added and its processor set."""
        model = cls(
            folder, dtype=cfg.model.dtype.value, attention=cfg.model.attention.value,
            gradient_checkpointing=cfg.backend.gradient_checkpointing, logits_chunk=cfg.backend.logits_chunk, seed=cfg.seed,
            runtime=runtime, sharding=cfg.backend.sharding.value, trust_remote_code=cfg.model.trust_remote_code,
            revision=cfg.model.revision,
        )  # fmt: skip
        if cfg.adapter.name == "lora":
            model.add_adapter_to_model("default", cfg.adapter)
        model.set_processor(InputProcessor("right", cfg.trainer.micro_batch_size, cfg.trainer.micro_batch_tokens))
        return model

    # --- set-up -------------------------------------------------------------------------------------------------

    def add_adapter_to_model(self, adapter_name: str, config_or_dir: Any, gradient_accumulation_steps: int = 1) -> None:
        """``config_or_dir``: a peft LoraConfig, our LoraAdapterConfig, or a PEFT folder to start from."""
        if self._training is not None or self.adapter_name is not None:
            raise UserError("add_adapter_to_model must come first and once: one adapter at a time")
        if not adapter_name:
            raise ValueError("adapter_name is empty")
        config = lora.lora_config(config_or_dir)
        self._shard(trained=False)
        self.module = self._scorer.module = lora.add_lora(self.module, config, adapter_name, self.seed)
        self.adapter_name = adapter_name
        key_dropout(self.module, self.dropout)
        self.module.eval()
        self.start_training(gradient_accumulation_steps)
        if isinstance(config_or_dir, (str, Path)):
            self.load_adapter_weights(config_or_dir)

    def start_training(self, gradient_accumulation_steps: int = 1) -> TrainingState:
        """Chooses what is trained (the adapter, else everything). Implied by ``set_optimizer`` and the first backward."""
        self._shard(trained=True)
        if self.adapter_name:
            parameters = lora.adapter_parameters(self.module, self.adapter_name)
        elif self._shards:
            parameters = self._shards.parameters
        else:
            parameters = dict(self.module.named_parameters())
            self.module.requires_grad_(True)
        edges = (self.module.get_input_embeddings(), self.module.get_output_embeddings())
        outer = {id(p) for module in edges for p in module.parameters()}
        matrices = {name for name, p in parameters.items() if p.ndim == 2 and id(p) not in outer}
        layout = self._shards.layout if self._shards else WHOLE
        self._training = TrainingState(parameters, self.runtime, matrices, gradient_accumulation_steps, layout)
        return self._training

    def training_state(self, adapter_name: str | None = None) -> TrainingState:
        if adapter_name not in (None, "", self.adapter_name):
            raise UserError(f"no adapter {adapter_name!r}; the model has {self.adapter_name or 'none'}")
        return self._training or self.start_training()

    def set_template(self, template_cls: Any, **kwargs: Any) -> None:
        """A Template, its class or its name; ``model_id`` defaults to the model's own."""
        template = load_symbol(template_cls, "twinkle_research.template", "template")
        self.template = template(**({"model_id": self.model_id} | kwargs)) if isinstance(template, type) else template

    def set_processor(self, processor_cls: Any, **kwargs: Any) -> None:
        """An InputProcessor, its class or its name."""
        processor = load_symbol(processor_cls, "twinkle_research.processor", "processor")
        self.processor = processor(**kwargs) if isinstance(processor, type) else processor

    def set_loss(self, loss_cls: Any, **kwargs: Any) -> None:
        """A Loss, its class or its name."""
        self.loss = resolve_loss(loss_cls, **kwargs)

    def set_optimizer(self, optimizer_cls: Any, adapter_name: str | None = None, **kwargs: Any) -> None:
        """An optimizer config, a name (AdamW, Adam, SGD, Muon, default) or a class of torch.optim of that name."""
        self.training_state(adapter_name).set_optimizer(optimizer_spec(optimizer_cls, **kwargs))

    def set_lr_scheduler(
        self, scheduler_cls: Any, total_steps: int | None = None, adapter_name: str | None = None, **kwargs: Any
    ) -> None:
        """A scheduler config, a name of model.schedule.SCHEDULES or a function of the step; see build_schedule."""
        self.training_state(adapter_name).set_schedule(scheduler_cls, total_steps, **kwargs)

    def add_metric(self, metric_cls: Any, is_training: bool | None = None, **kwargs: Any) -> None:
        """``is_training=None``: for training and for evaluation."""
        for training in (True, False) if is_training is None else (is_training,):
            self.training_state().meters[training].add(metric_cls, **kwargs)

    # --- compute ------------------------------------------------------------------------------------------------

    @property
    def data_parallel(self) -> tuple[int, int]:
        return self.runtime.rank, self.runtime.world_size

    @property
    def is_sharded(self) -> bool:
        return self._shards is not None

    @property
    def layout(self) -> dict[str, Any]:
        several = "fsdp2" if self.is_sharded else "ddp"
        return {"world_size": self.runtime.world_size, "sharding": several if self.runtime.world_size > 1 else "none"}

    def count(self, features: Sequence[InputFeature], adapter_name: str | None = None) -> int:
        return int(self.runtime.all_reduce_sum(self.loss.count(features)))

    def forward_backward(
        self, inputs: Sequence[InputFeature], normalizer: float | None = None, adapter_name: str | None = None, **loss_inputs: Any
    ) -> Result:
        training = self.training_state(adapter_name)
        divisor = training.open(normalizer)
        self._set_mode(training=True)
        scored = []
        for item in self._passes(inputs, loss_inputs):
            self._score(item, divisor)
            self._compute_loss(item, divisor)
            self._backward(item)
            scored.append(item)
        return self._finish_call(scored, divisor, normalizer is not None, training)

    def forward_only(
        self, inputs: Sequence[InputFeature], adapter_name: str | None = None, disable_lora: bool = False, **loss_inputs: Any
    ) -> Result:
        training = self.training_state(adapter_name)
        self._set_mode(training=False)
        scored = []
        with torch.no_grad(), self._without_lora() if disable_lora else nullcontext():
            for item in self._passes(inputs, loss_inputs):
                self._score(item, None)
                self._compute_loss(item, 1.0)
                scored.append(item)
        return self._finish_call(scored, 1.0, False, training, is_training=False)

    def forward(self, inputs: Sequence[InputFeature], adapter_name: str | None = None, **kwargs: Any) -> Result:
        """The forward part of ``forward_backward``, to be followed by ``calculate_loss`` and ``backward``."""
        self.training_state(adapter_name)
        self._set_mode(training=True)
        self._scored = list(self._passes(inputs, kwargs))
        for item in self._scored:
            self._score(item, None)
        return Result({"logps": [row for item in self._scored if item.features for row in _logps(item)]})

    def calculate_loss(self, adapter_name: str | None = None, **loss_inputs: Any) -> float:
        """The loss of the last ``forward``, divided by its own normaliser."""
        if not self._scored:
            raise UserError("calculate_loss needs a forward before it")
        features = [f for item in self._scored for f in item.features]
        if loss_inputs:
            own = [item for item in self._scored if item.features]
            for item, other in zip(own, self._micro_batches(features, loss_inputs), strict=True):
                item.micro.inputs = other.micro.inputs
        for item in self._scored:
            self._compute_loss(item, 1.0)
        total = sum(float(item.output.loss.detach()) for item in self._scored if item.output is not None)
        return total / max(self.loss.count(features), 1)

    def backward(self, adapter_name: str | None = None) -> None:
        """Adds the gradient of the last ``calculate_loss``, as a sum that the optimizer step will divide."""
        training = self.training_state(adapter_name)
        if not self._scored or all(item.scores is not None and item.output is None for item in self._scored):
            raise UserError("backward needs a forward and a calculate_loss before it")
        scored, self._scored = self._scored, []
        training.open(None)
        for item in scored:
            self._backward(item)
        self._finish_call(scored, 1.0, False, training)

    def clip_grad_norm(self, max_grad_norm: float | None = 1.0, norm_type: float = 2, adapter_name: str | None = None) -> float:
        return self.training_state(adapter_name).clip_grad_norm(max_grad_norm, norm_type)

    def step(self, adapter_name: str | None = None) -> None:
        self.training_state(adapter_name).step()
        self._first_sample = 0

    def zero_grad(self, adapter_name: str | None = None) -> None:
        self.training_state(adapter_name).zero_grad()

    def lr_step(self, adapter_name: str | None = None) -> None:
        self.training_state(adapter_name).lr_step()

    def clip_grad_and_step(
        self, max_grad_norm: float | None = 1.0, norm_type: float = 2, adapter_name: str | None = None
    ) -> None:
        self._first_sample = 0
        self.training_state(adapter_name).clip_grad_and_step(max_grad_norm, norm_type)

    def finish_window(self, max_grad_norm: float | None = 1.0, adapter_name: str | None = None) -> None:
        self.training_state(adapter_name).finish_window(max_grad_norm)

    def calculate_metric(self, is_training: bool, adapter_name: str | None = None) -> Result:
        return Result(self.training_state(adapter_name).meters[is_training].calculate(self.runtime.gather_objects))

    def get_train_configs(self, adapter_name: str | None = None) -> TrainConfigs:
        training = self.training_state(adapter_name)
        return TrainConfigs(
            model_id=self.model_id,
            adapter_name=self.adapter_name or "",
            adapter=lora.config_json(self.module.peft_config[self.adapter_name]) if self.adapter_name else None,
            loss=type(self.loss).__name__,
            optimizer=training.optimizer.spec.describe() if training.optimizer else None,
            scheduler=training.schedule.describe(),
            gradient_accumulation_steps=training.gradient_accumulation_steps,
            trainable_parameters=sum(training.layout.shape(name, p).numel() for name, p in training.parameters.items()),
            total_parameters=sum(p.numel() for p in self.module.parameters()),
        )

    # --- one micro-batch ----------------------------------------------------------------------------------------

    def _micro_batches(self, inputs: Sequence[InputFeature], loss_inputs: dict[str, Any]) -> Iterator[_Scored]:
        inputs = [inputs] if isinstance(inputs, dict) else list(inputs)
        for name, values in loss_inputs.items():
            if values is not None and len(values) != len(inputs):
                raise ValueError(f"{name} has {len(values)} entries for {len(inputs)} rows")
        step = self.training_state().cur_step
        for part in self.processor.split_indices([len(f["input_ids"]) for f in inputs]):
            features = [inputs[i] for i in part]
            own = {name: None if values is None else [values[i] for i in part] for name, values in loss_inputs.items()}
            batch = self.processor.collate(features, "cpu", **own)
            yield _Scored(self._scorer.prepare(batch, step, self._first_sample), features)
            self._first_sample += len(features)

    def _passes(self, inputs: Sequence[InputFeature], loss_inputs: dict[str, Any]) -> Iterator[_Scored]:
        """This rank's micro-batches. Where the model is sharded every pass is collective: the ranks with fewer of them
        go through empty ones."""
        if self._shards is None:
            yield from self._micro_batches(inputs, loss_inputs)
            return
        items = list(self._micro_batches(inputs, loss_inputs))
        missing = self.runtime.max(len(items)) - len(items)
        yield from items
        zeros = {name: None if values is None else [0.0] for name, values in loss_inputs.items()}
        for _ in range(missing):
            batch = self.processor.collate([{"input_ids": [0], "labels": [IGNORE_INDEX]}], "cpu", **zeros)
            yield _Scored(self._scorer.prepare(batch, self.training_state().cur_step, 0), [])

    def _score(self, item: _Scored, divisor: float | None) -> None:
        """A micro-batch without a trained position adds nothing, so it does not run where no other rank waits for it."""
        if self._shards:
            item.scores = self._shards.run(lambda: self._scorer.scores(item.micro, self.loss, divisor))
        elif item.micro.num_tokens:
            item.scores = self._scorer.scores(item.micro, self.loss, divisor)

    def _compute_loss(self, item: _Scored, divisor: float) -> None:
        if item.scores is not None:
            item.output = self.loss(item.scores, item.micro.inputs, divisor)

    def _backward(self, item: _Scored) -> None:
        if item.output is not None:
            self.dropout.key = item.micro.dropout_key  # gradient checkpointing runs the forward pass again
            item.output.loss.backward()
            item.output.loss = item.output.loss.detach()
            item.scores = TokenScores(item.scores.logprobs.detach())  # lets go of the graph
        self.dropout.key = None

    def _finish_call(
        self, scored: list[_Scored], divisor: float, normalized: bool, training: TrainingState, is_training: bool = True
    ) -> Result:
        """Reads the results off the device, once for the whole call, and books them."""
        features = [f for item in scored for f in item.features]
        outputs = [item.output for item in scored if item.output is not None]
        losses = torch.stack([output.loss.detach() for output in outputs]).tolist() if outputs else []
        loss = sum(losses)
        count = self.loss.count(features)
        logps = [row for item in scored if item.features for row in _logps(item)]
        tokens = sum(item.micro.num_tokens for item in scored)
        extra = _extra_sums(outputs)
        training.meters[is_training].accumulate(CallRecord(loss * divisor, count, tokens, extra, features, logps))
        if is_training:
            ran = [item for item in scored if item.output is not None]
            bad = [item for item, value in zip(ran, losses, strict=True) if not math.isfinite(value)]
            training.record(count, [row for item in bad for row in _bad_rows(item)], bool(bad))
        return Result({"loss": loss if normalized else loss / max(count, 1), "num_tokens": tokens, "logps": logps})

    def _set_mode(self, training: bool) -> None:
        if self.module.training != training:
            self.module.train(training)

    @contextmanager
    def _without_lora(self) -> Iterator[None]:
        if self.adapter_name is None:
            raise UserError("disable_lora=True needs an adapter: this model is trained in full")
        with self.module.disable_adapter():
            yield

    # --- weights ------------------------------------------------------------------------------------------------

    def named_weights(self) -> Iterable[tuple[str, Tensor]]:
        """Names of the model in memory (transformers' own), not of its files."""
        if self.adapter_name:
            return lora.merged_weights(self.module, self.adapter_name)
        return ((name, lora.whole(p.detach())) for name, p in self.module.named_parameters())

    @contextmanager
    def sampling(self) -> Iterator[nn.Module]:
        """The module for generation. Where the model is sharded all ranks generate, and generate the same."""
        try:
            yield self.module
        finally:
            if self._shards:
                self._shards.release()



def _logps(item: _Scored) -> list[list[float]]:
    return logps_by_row(item.micro, item.scores.logprobs if item.scores is not None else None)


def _extra_sums(outputs: list[LossOutput]) -> dict[str, tuple[float, float]]:
    names = dict.fromkeys(name for output in outputs for name in output.metrics)
    pairs = {name: [output.metrics[name] for output in outputs if name in output.metrics] for name in names}
    return {name: (sum(float(s) for s, _ in found), sum(float(n) for _, n in found)) for name, found in pairs.items()}


def _bad_rows(item: _Scored) -> list[str]:
    """Names of the rows whose own loss is not finite."""
    bad = (~torch.isfinite(item.output.sequence_losses)).nonzero().squeeze(-1).tolist()
    sequences = item.micro.batch.sequence_ids
    rows = [i for i in range(len(item.features)) if bool(torch.isin(sequences[i], torch.tensor(bad)).any())]
    return [item.micro.batch.rows[i] or f"row {i}" for i in rows]
