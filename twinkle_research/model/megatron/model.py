"""MegatronModel: the model interface on Megatron-Core, in any layout of its kinds of parallelism."""

from __future__ import annotations

import math
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
from twinkle_research.model.lora_config import check_name, config_json, lora_config
from twinkle_research.model.megatron import families, lora
from twinkle_research.model.megatron.architecture import Architecture
from twinkle_research.model.megatron.build import build_chunks
from twinkle_research.model.megatron.compute import Compute
from twinkle_research.model.megatron.config import MegatronBackendConfig
from twinkle_research.model.megatron.directory import Directory
from twinkle_research.model.megatron.mesh import Mesh
from twinkle_research.model.megatron.sampling import SamplingCopy
from twinkle_research.model.megatron.state import MegatronState
from twinkle_research.model.megatron.training import MeshTrainingState
from twinkle_research.model.passes import Trained
from twinkle_research.model.saving import SavingMixin
from twinkle_research.model.trained import TrainedModel
from twinkle_research.model.training import TrainingState
from twinkle_research.model.transformers.loading import weights_folder
from twinkle_research.processor.base import InputProcessor
from twinkle_research.symbols import construct, load_symbol

if TYPE_CHECKING:
    from twinkle_research.model.value_head import ValueHead
    from twinkle_research.trainer.config import TrainConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class MegatronModel(CompanionsMixin, SavingMixin, TrainedModel):
    """``model_id``: a Hugging Face folder or hub id. ``layout``: over how many processes each part is spread; by default none
    is. ``runtime``: this rank's place among the others.

    Without ``add_adapter_to_model`` all weights are trained. Every call that computes, saves or reads weights is
    collective. ``close`` lets another model with another layout follow.
    """

    backend = "megatron"

    def __init__(
        self,
        model_id: str | Path,
        *,
        dtype: str = "float32",
        layout: MegatronBackendConfig | None = None,
        seed: int = 0,
        runtime: Runtime | None = None,
        trust_remote_code: bool = False,
        revision: str | None = None,
    ) -> None:
        if dtype not in DTYPES:
            raise ConfigError(f"model.dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
        self.model_id = str(model_id)
        self.seed = seed
        self.runtime = runtime or Runtime()
        self.device = self.runtime.device
        self.dtype = DTYPES[dtype]
        self._trust_remote_code = trust_remote_code
        folder = weights_folder(model_id, revision)
        self.folder = folder.path
        self.architecture = Architecture.read(folder.path, trust_remote_code)
        self.mesh = Mesh.open(self.runtime, layout or MegatronBackendConfig())
        self.chunks = build_chunks(self.architecture, self.mesh, self.dtype)
        self.parameters = families.named_parameters(self.architecture, self.mesh, self.chunks)
        self.directory = Directory(self.mesh, families.pieces(self.architecture, self.mesh, self.parameters))
        self.directory.load(
            folder, self.parameters.__getitem__, is_ignored=lambda name: families.is_ignored(self.architecture, name)
        )
        self._adapters = lora.Adapters(self.chunks, self.mesh, self.architecture, seed)
        self._runs: dict[str, Trained] = {"": Trained("")}
        self._compute = Compute(self.chunks, self.mesh, self.architecture.vocab_size, activate=self._activate)
        self._copy: SamplingCopy | None = None
        self._closed = False

    @classmethod
    def from_config(cls, cfg: TrainConfig, folder: str | Path, runtime: Runtime) -> MegatronModel:
        """The model that ``cfg`` describes, its weights from ``folder``, its adapter added and its processor set."""
        model = cls(
            folder, dtype=cfg.model.dtype.value, layout=cfg.backend, seed=cfg.seed, runtime=runtime,
            trust_remote_code=cfg.model.trust_remote_code, revision=cfg.model.revision,
        )  # fmt: skip
        model.configure(cfg)
        return model

    def close(self) -> None:
        """Collective. Frees weights and optimizers; every call after it is refused."""
        if not self._closed:
            self._closed = True
            self._free()
            self.mesh.close()

    def _free(self) -> None:
        for run in self._runs.values():
            if run.training is not None:
                run.training.gradients.close()
        self._copy = None
        del self._runs, self._compute, self._adapters, self.directory, self.parameters, self.chunks

    def __getattr__(self, name: str) -> Any:
        if self.__dict__.get("_closed"):  # it had all that a call needs
            raise UserError("this model is closed")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # --- what is trained ----------------------------------------------------------------------------------------

    def _begin(self, run: Trained, gradient_accumulation_steps: int = 1) -> TrainingState:
        if run.name:
            self._activate(run)
            trained = self._adapters[run.name].parameters
        else:
            trained = self.parameters
            for parameter in trained.values():
                parameter.requires_grad_(True)
        run.training = MeshTrainingState(trained, self.mesh, self.chunks, gradient_accumulation_steps)
        return run.training

    def _activate(self, run: Trained) -> None:
        if run.name:
            self._adapters.activate(run.name)

    def add_adapter_to_model(self, adapter_name: str, config_or_dir: Any, gradient_accumulation_steps: int = 1) -> None:
        """``config_or_dir``: a peft LoraConfig, our LoraAdapterConfig, or a PEFT folder to start from."""
        if "" not in self._runs or self._runs[""].training is not None:
            raise UserError("add_adapter_to_model must come first and once: one adapter at a time")
        check_name(adapter_name)
        self._adapters.add(adapter_name, lora_config(config_or_dir))
        run = self._runs[""]
        run.name = adapter_name
        self._runs = {adapter_name: run}
        self._begin(run, gradient_accumulation_steps)
        if isinstance(config_or_dir, str | Path):
            self.load_adapter_weights(config_or_dir, adapter_name)

    def model_state(self, adapter_name: str | None = None, among_others: bool = False) -> MegatronState:
        """What is stored of it. ``among_others``: in a checkpoint of several adapters."""
        return MegatronState(self, adapter_name, among_others)

    def directory_of(self, run: Trained) -> Directory:
        """Of what ``run`` trains, its value head aside."""
        return self._adapters[run.name].directory if run.name else self.directory

    def adapter_json(self, adapter_name: str) -> dict[str, Any]:
        """The content of its adapter_config.json."""
        return config_json(self._adapters[adapter_name].config)

    def _trainable_parameters(self, run: Trained) -> int:
        trained = self._adapters[run.name].directory.shapes if run.name else self.directory.shapes
        head = sum(p.numel() for p in run.value_head.parameters()) if run.value_head else 0
        return sum(math.prod(shape) for shape in trained.values()) + head

    def _total_parameters(self) -> int:
        directories = [self.directory, *(self._adapters[name].directory for name in self._runs if name)]
        return sum(math.prod(shape) for directory in directories for shape in directory.shapes.values())

    @property
    def _hidden_size(self) -> int:
        return self.architecture.hidden_size

    def _place(self, head: ValueHead, run: Trained) -> dict[str, nn.Parameter]:
        """On the last pipeline stage, which computes it. The others have one that stays as it is."""
        if not self.mesh.pp.is_last:
            return {}
        self.chunks[-1].add_module(f"value_head_{run.name}", head)
        return head.named()

    # --- set-up -------------------------------------------------------------------------------------------------

    def set_processor(self, processor_cls: Any, adapter_name: str | None = None, **kwargs: Any) -> None:
        """An InputProcessor, its class or its name. Whether it pads or packs: here documents are packed in any case."""
        processor = load_symbol(processor_cls, "twinkle_research.processor", "processor")
        processor = construct(processor, "set_processor", **kwargs)
        if not isinstance(processor, InputProcessor):
            raise ConfigError(f"a processor is an InputProcessor, its class or its name, got {processor!r}")
        self._run(adapter_name).processor = processor

    # --- compute ------------------------------------------------------------------------------------------------

    @property
    def data_parallel(self) -> tuple[int, int]:
        return self.mesh.data_parallel

    @property
    def shares(self) -> Runtime:
        return self.mesh.shares

    @property
    def is_sharded(self) -> bool:
        return self.runtime.world_size > 1

    @property
    def layout(self) -> dict[str, Any]:
        return self.mesh.describe()

    def forward_backward(
        self, inputs: Sequence[InputFeature], normalizer: float | None = None, adapter_name: str | None = None, **loss_inputs: Any
    ) -> Result:
        run = self.trained(adapter_name)
        divisor = run.training.open(normalizer)
        self._set_mode(training=True)
        return self._compute.run(
            run, inputs, loss_inputs, divisor, normalized=normalizer is not None, backward=True, is_training=True
        )

    def forward_only(
        self, inputs: Sequence[InputFeature], adapter_name: str | None = None, disable_lora: bool = False, **loss_inputs: Any
    ) -> Result:
        run = self.trained(adapter_name)
        self._set_mode(training=False)
        with self._without_lora(run) if disable_lora else nullcontext():
            return self._compute.run(run, inputs, loss_inputs, 1.0, normalized=False, backward=False, is_training=False)

    def _set_mode(self, training: bool) -> None:
        for chunk in self.chunks:
            if chunk.training != training:
                chunk.train(training)

    @contextmanager
    def _without_lora(self, run: Trained) -> Iterator[None]:
        if not run.name:
            raise UserError("disable_lora=True needs an adapter: this model is trained in full")
        with self._adapters.disabled():
            yield

    # --- weights ------------------------------------------------------------------------------------------------

    def named_weights(self, adapter_name: str | None = None) -> Iterable[tuple[str, Tensor]]:
        """Names of the model's folder, as ``disk_weights``."""
        run = self.trained(adapter_name)
        run.training.layout.release()
        dtypes = dict.fromkeys(self.directory.shapes, self.dtype)
        if not run.name:
            return self.directory.stream(self.parameters.__getitem__, dtypes=dtypes)
        adapter = self._adapters[run.name]
        return self.directory.stream(lambda name: adapter.effective(name, self.parameters[name]), dtypes=dtypes)

    @contextmanager
    def sampling(self, adapter_name: str | None = None) -> Iterator[nn.Module]:
        """A transformers model with the present weights. Where there are several processes all generate the same."""
        if self._copy is None:
            self._copy = SamplingCopy(self.model_id, self.dtype, self.device, self._trust_remote_code)
        self._copy.update(self.named_weights(adapter_name))
        yield self._copy.module
