"""TransformersModel: a causal language model of transformers, trained in full or through a LoRA, in one process or in
several (ddp: gradient sums; fsdp2: sharded)."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from twinkle_research.data_format import InputFeature
from twinkle_research.distributed.runtime import Runtime
from twinkle_research.errors import ConfigError, UserError
from twinkle_research.model.base import Result
from twinkle_research.model.companions import CompanionsMixin
from twinkle_research.model.dropout import DropoutState, key_dropout, zero_functional_dropout
from twinkle_research.model.layout import WHOLE
from twinkle_research.model.lora_config import check_name, config_json, lora_config
from twinkle_research.model.passes import Trained
from twinkle_research.model.saving import SavingMixin
from twinkle_research.model.trained import TrainedModel
from twinkle_research.model.training import TrainingState
from twinkle_research.model.transformers import lora
from twinkle_research.model.transformers.compute import Compute
from twinkle_research.model.transformers.head import Anatomy
from twinkle_research.model.transformers.loading import DTYPES, load_model, load_skeleton
from twinkle_research.model.transformers.names import DiskNames
from twinkle_research.model.transformers.packing import check_packing
from twinkle_research.model.transformers.scoring import Scorer
from twinkle_research.model.transformers.state import TransformersState
from twinkle_research.processor.base import InputProcessor
from twinkle_research.symbols import construct, load_symbol

if TYPE_CHECKING:
    from twinkle_research.checkpoint.stream import TensorFolder
    from twinkle_research.model.transformers.sharding import ShardedModel
    from twinkle_research.trainer.config import TrainConfig

log = logging.getLogger(__name__)


class TransformersModel(CompanionsMixin, SavingMixin, TrainedModel):
    """``model_id``: a folder or hub id. ``runtime``: this rank's place among the others; None for a single process.

    Without ``add_adapter_to_model`` all weights are trained. Gradients are sums that are divided at the optimizer step,
    so nothing depends on how a step is cut into calls, micro-batches and ranks.
    """

    backend = "transformers"

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
        self._runs: dict[str, Trained] = {"": Trained("")}
        self._disk_names: dict[str, DiskNames] = {}  # of the whole model, by adapter
        self._compute: Compute
        if self._unread is None:
            self._take_apart()

    def _take_apart(self) -> None:
        anatomy = Anatomy.of(self.module)
        scorer = Scorer(
            self.module, anatomy.body, anatomy.transform, self.device, torch.promote_types(self.dtype, torch.float32),
            self.logits_chunk, self.dropout, self.module.get_input_embeddings().weight.shape[0],
        )  # fmt: skip
        self._compute = Compute(scorer, self._shards, self._activate)

    def _shard(self, trained: bool) -> None:
        """With sharding=fsdp2, once: cuts the model and loads this rank's part of it. Collective."""
        if self._unread is not None:
            from twinkle_research.model.transformers.sharding import ShardedModel

            folder, self._unread = self._unread, None
            self._shards = ShardedModel(self.module, self.runtime, self.dtype, folder, trained=trained)
            self._take_apart()
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
        model.configure(cfg)
        return model

    # --- what is trained ----------------------------------------------------------------------------------------

    def _begin(self, run: Trained, gradient_accumulation_steps: int = 1) -> TrainingState:
        self._shard(trained=not run.name)
        if run.name:
            parameters = lora.adapter_parameters(self.module, run.name)
        elif self._shards:
            parameters = self._shards.parameters
        else:
            parameters = dict(self.module.named_parameters())
            self.module.requires_grad_(True)
        edges = (self.module.get_input_embeddings(), self.module.get_output_embeddings())
        outer = {id(p) for module in edges for p in module.parameters()}
        matrices = {name for name, p in parameters.items() if p.ndim == 2 and id(p) not in outer}
        layout = self._shards.layout if self._shards else WHOLE
        run.training = TrainingState(parameters, self.runtime, matrices, gradient_accumulation_steps, layout)
        return run.training

    def model_state(self, adapter_name: str | None = None, among_others: bool = False) -> TransformersState:
        """What is stored of it. ``among_others``: in a checkpoint of several adapters."""
        return TransformersState(self, adapter_name, among_others)

    def adapter_json(self, adapter_name: str) -> dict[str, Any]:
        """The content of its adapter_config.json."""
        return config_json(self.module.peft_config[adapter_name])

    def _trainable_parameters(self, run: Trained) -> int:
        return sum(run.training.layout.shape(name, p).numel() for name, p in run.training.parameters.items())

    def _total_parameters(self) -> int:
        return sum(p.numel() for p in self.module.parameters())

    def _activate(self, run: Trained) -> None:
        """There is only one adapter, and it is always active."""

    def add_adapter_to_model(self, adapter_name: str, config_or_dir: Any, gradient_accumulation_steps: int = 1) -> None:
        """``config_or_dir``: a peft LoraConfig, our LoraAdapterConfig, or a PEFT folder to start from."""
        if "" not in self._runs or self._runs[""].training is not None:
            raise UserError("add_adapter_to_model must come first and once: one adapter at a time")
        check_name(adapter_name)
        config = lora_config(config_or_dir)
        self._shard(trained=False)
        run = self._runs[""]
        self._inject(config, adapter_name)
        run.name = adapter_name
        self._runs = {adapter_name: run}
        self._begin(run, gradient_accumulation_steps)
        if isinstance(config_or_dir, (str, Path)):
            self.load_adapter_weights(config_or_dir, adapter_name)

    def _inject(self, config: Any, adapter_name: str) -> None:
        self.module = self._compute.scorer.module = lora.add_lora(self.module, config, adapter_name, self.seed)
        key_dropout(self.module, self.dropout, lambda name: lora.disk_name(name, adapter_name))
        self.module.eval()
        self.module.set_adapter(adapter_name)

    # --- set-up -------------------------------------------------------------------------------------------------

    def set_processor(self, processor_cls: Any, adapter_name: str | None = None, **kwargs: Any) -> None:
        """An InputProcessor, its class or its name. One that packs is tried out first: ConfigError where this model would
        let packed documents see each other."""
        processor = load_symbol(processor_cls, "twinkle_research.processor", "processor")
        processor = construct(processor, "set_processor", **kwargs)
        if not isinstance(processor, InputProcessor):
            raise ConfigError(f"a processor is an InputProcessor, its class or its name, got {processor!r}")
        if processor.packing:
            check_packing(self._compute_of(adapter_name), self.trained(adapter_name), self.module.config, self.dtype)
        self._run(adapter_name).processor = processor

    def _compute_of(self, adapter_name: str | None) -> Compute:
        self.trained(adapter_name)  # a sharded model is only loaded then
        return self._compute

    # --- compute ------------------------------------------------------------------------------------------------

    @property
    def data_parallel(self) -> tuple[int, int]:
        return self.runtime.rank, self.runtime.world_size

    @property
    def shares(self) -> Runtime:
        return self.runtime

    @property
    def is_sharded(self) -> bool:
        return self._shards is not None or self._unread is not None

    @property
    def layout(self) -> dict[str, Any]:
        several = "fsdp2" if self.is_sharded else "ddp"
        return {"world_size": self.runtime.world_size, "sharding": several if self.runtime.world_size > 1 else "none"}

    def forward_backward(
        self, inputs: Sequence[InputFeature], normalizer: float | None = None, adapter_name: str | None = None, **loss_inputs: Any
    ) -> Result:
        run, compute = self.trained(adapter_name), self._compute
        divisor = run.training.open(normalizer)
        self._set_mode(training=True)
        done = []
        for item in compute.passes(run, inputs, loss_inputs, run.loss.rows_together):
            compute.score(run, item, run.loss, divisor)
            compute.add_loss(run, item, divisor)
            compute.backward(run, item)
            done.append(item)
        return compute.finish(run, done, divisor, normalizer is not None)

    def forward_only(
        self, inputs: Sequence[InputFeature], adapter_name: str | None = None, disable_lora: bool = False, **loss_inputs: Any
    ) -> Result:
        run, compute = self.trained(adapter_name), self._compute
        self._set_mode(training=False)
        first, done = run.first_sample, []
        with torch.no_grad(), self._without_lora(run) if disable_lora else nullcontext():
            for item in compute.passes(run, inputs, loss_inputs, run.loss.rows_together):
                compute.score(run, item, run.loss, None)
                compute.add_loss(run, item, 1.0)
                done.append(item)
        run.first_sample = first  # scoring in between does not change the dropout masks of the step
        return compute.finish(run, done, 1.0, False, is_training=False)

    def forward(self, inputs: Sequence[InputFeature], adapter_name: str | None = None, **kwargs: Any) -> Result:
        """The forward part of ``forward_backward``, to be followed by ``calculate_loss`` and ``backward``."""
        run = self.trained(adapter_name)
        self._set_mode(training=True)
        return self._compute.forward(run, inputs, kwargs)

    def calculate_loss(self, adapter_name: str | None = None, **loss_inputs: Any) -> float:
        """The loss of the last ``forward``, divided by its own normaliser."""
        return self._compute_of(adapter_name).calculate_loss(self.trained(adapter_name), loss_inputs)

    def backward(self, adapter_name: str | None = None) -> None:
        """Adds the gradient of the last ``calculate_loss``, as a sum that the optimizer step will divide."""
        self._set_mode(training=True)  # gradient checkpointing runs the forward pass again
        self._compute_of(adapter_name).backward_all(self.trained(adapter_name))

    @property
    def _hidden_size(self) -> int:
        return self.module.get_output_embeddings().weight.shape[1]

    def _set_mode(self, training: bool) -> None:
        if self.module.training != training:
            self.module.train(training)

    @contextmanager
    def _without_lora(self, run: Trained) -> Iterator[None]:
        if not run.name:
            raise UserError("disable_lora=True needs an adapter: this model is trained in full")
        self._activate(run)
        with self.module.disable_adapter():
            yield

    # --- weights ------------------------------------------------------------------------------------------------

    def named_weights(self, adapter_name: str | None = None) -> Iterable[tuple[str, Tensor]]:
        """Names of the model in memory (transformers' own), not of its files."""
        run = self.trained(adapter_name)
        if run.name:
            return lora.merged_weights(self.module, run.name)
        return ((name, lora.whole(p.detach())) for name, p in self.module.named_parameters())

    def disk_weights(self, adapter_name: str | None = None) -> Iterable[tuple[str, Tensor]]:
        run = self.trained(adapter_name)
        if run.name not in self._disk_names:
            base = self.module.get_base_model() if run.name else self.module
            shapes = lora.merged_shapes(self.module, run.name) if run.name else {n: p.shape for n, p in base.named_parameters()}
            self._disk_names[run.name] = DiskNames(base, shapes)
        return self._disk_names[run.name].convert(self.named_weights(adapter_name))

    @contextmanager
    def sampling(self, adapter_name: str | None = None) -> Iterator[nn.Module]:
        """The module for generation. Where the model is sharded all ranks generate, and generate the same."""
        self._activate(self.trained(adapter_name))
        try:
            yield self.module
        finally:
            if self._shards:
                self._shards.release()
