"""LoRA as in PEFT on Megatron-Core: several adapters on frozen chunks, one of them active.

They work by forward hooks beside the parallel linear layers, so that the base's weights keep their names and places. Each
adapter has PEFT's factors of the Hugging Face model (q, k, v and gate, up apart), and their names.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn

from twinkle_research.errors import ConfigError
from twinkle_research.model.config import LoraAdapterConfig
from twinkle_research.model.facts import is_vocabulary_module
from twinkle_research.model.lora_config import PREFIX, inject, lora_config
from twinkle_research.model.megatron import families
from twinkle_research.model.megatron.blocks import WholeLinear
from twinkle_research.model.megatron.config import Recompute
from twinkle_research.model.megatron.directory import Directory
from twinkle_research.model.megatron.lora_layers import Factors, Rank, Site
from twinkle_research.model.megatron.pieces import Piece
from twinkle_research.model.megatron.tokens import KeyedSeqParams, LocalTokens

if TYPE_CHECKING:
    from peft import LoraConfig
    from torch.utils.hooks import RemovableHandle
    from transformers import PreTrainedModel

    from twinkle_research.model.megatron.architecture import Architecture
    from twinkle_research.model.megatron.build import PolicyModel
    from twinkle_research.model.megatron.mesh import Mesh


@dataclass(frozen=True)
class Adapter:
    """What this process has of one adapter: none of it where the layers here get no LoRA.

    ``config``: as adapter_config.json says it. ``parameters`` and ``directory`` go by PEFT's names on disk, which name them
    in memory too. ``factors``: by the name in memory of the base's weight.
    """

    name: str
    config: LoraConfig
    parameters: dict[str, nn.Parameter]
    directory: Directory
    factors: dict[str, tuple[Site, list[Factors | None]]]

    def effective(self, memory: str, weight: Tensor) -> Tensor:
        """The base's parameter ``memory`` with the LoRA merged in float32 and rounded once; ``weight`` and the result are this
        process's part of it."""
        if memory not in self.factors:
            return weight
        site, factors = self.factors[memory]
        return site.merged(weight, factors)


class Adapters:
    """The adapters on this process's ``chunks``, whose own parameters are frozen. ``seed``: of initial values and of dropout.

    Parameters are registered in the chunks, as ``adapters.<adapter>.<PEFT's name>``. All processes must do the same.
    """

    def __init__(self, chunks: Sequence[PolicyModel], mesh: Mesh, architecture: Architecture, seed: int) -> None:
        self._chunks = list(chunks)
        self._mesh = mesh
        self._architecture = architecture
        self._seed = seed
        self._adapters: dict[str, Adapter] = {}
        self._sites: list[tuple[PolicyModel, Site]] = [
            (chunk, site) for chunk in self._chunks for site in self._find_sites(chunk)
        ]
        self._hooks: list[RemovableHandle] = []
        self._active: str | None = None
        self._is_off = False
        self._tokens: LocalTokens | None = None  # of the micro-batch that a layer computes now

    def __getitem__(self, name: str) -> Adapter:
        return self._adapters[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._adapters)

    @property
    def active(self) -> str | None:
        """The adapter that is computed and trained."""
        return self._active

    def _find_sites(self, chunk: PolicyModel) -> Iterator[Site]:
        weights = families.named_parameters(self._architecture, self._mesh, [chunk])
        names = {weight: name for name, weight in weights.items() if ".experts." not in name}
        for module in chunk.decoder.modules():
            if isinstance(module, (ColumnParallelLinear, RowParallelLinear, WholeLinear)) and module.weight in names:
                name = names[module.weight]
                tensors = families.pieces(self._architecture, self._mesh, {name: module.weight})[name]
                groups = len(tensors[0].view(module.weight)) if name.endswith("linear_qkv.weight") else 1
                yield Site(module, name, tensors, groups, self._mesh)

    # --- adding and removing ------------------------------------------------------------------------------------

    def add(self, name: str, config: LoraConfig | LoraAdapterConfig | str | Path) -> Adapter:
        """A new adapter, not active yet: A drawn by key, B 0. ``config``: as ``lora_config`` takes it. ConfigError for what PEFT
        or this backend cannot do, before anything is changed. Collective."""
        heads = self._architecture.num_kv_heads
        if heads % self._mesh.tp.size:  # a process would lack parts of k or v that others have
            raise ConfigError(
                f"backend.tensor_parallel={self._mesh.tp.size} must divide the {heads} key-value heads of a model with a LoRA"
            )
        own, ranks = _as_peft_does(self._architecture, lora_config(config), name)
        parameters: dict[str, nn.Parameter] = {}
        pieces: dict[str, list[Piece]] = {}
        by_weight: dict[str, tuple[Site, list[Factors | None]]] = {}
        for chunk, site in self._sites:
            wanted = [ranks.get(tensor.name.removesuffix(".weight")) for tensor in site.tensors]
            if not any(wanted):
                continue
            factors = [rank and site.make(tensor, rank, self._seed) for tensor, rank in zip(site.tensors, wanted, strict=True)]
            by_weight[site.memory] = site, factors
            for tensor, made in zip(site.tensors, factors, strict=True):
                for on_disk, parameter, piece in site.parts(tensor, made) if made else ():
                    parameters[on_disk], pieces[on_disk] = parameter, [piece]
                    _register(chunk, f"{families.ADAPTERS}.{name}.{on_disk}", parameter)
        adapter = self._adapters[name] = Adapter(name, own, parameters, Directory(self._mesh, pieces), by_weight)
        if left := sorted({n for rank in ranks.values() for n in rank.names} - set(adapter.directory.shapes)):
            self.remove(name)
            raise ConfigError(
                f"adapter.target_modules names {left[0]}, for which backend=megatron has no linear layer of its own"
            )
        if not self._hooks:
            self._hooks = list(self._hook())
        return adapter

    def remove(self, name: str) -> None:
        """Releases its parameters. Where it was active none is now."""
        if self._active == name:
            self.activate(None)
        del self._adapters[name]
        for chunk in self._chunks:
            root = chunk._modules.get(families.ADAPTERS)
            if root is not None:
                root._modules.pop(name, None)
        if not self._adapters:
            for hook in self._hooks:
                hook.remove()
            self._hooks.clear()

    # --- which one is computed ----------------------------------------------------------------------------------

    def activate(self, name: str | None) -> None:
        """Only its parameters require a gradient from now on. None: the base alone."""
        self._active = name
        for adapter in self._adapters.values():
            for parameter in adapter.parameters.values():
                parameter.requires_grad_(adapter.name == name)
        factors = self._adapters[name].factors if name is not None else {}
        for _, site in self._sites:
            site.active = factors[site.memory][1] if site.memory in factors else None

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Within it the base is computed alone."""
        before, self._is_off = self._is_off, True
        try:
            yield
        finally:
            self._is_off = before

    def _hook(self) -> Iterator[RemovableHandle]:
        def add(site: Site, args: tuple[Any, ...], output: tuple[Any, ...]) -> tuple[Any, ...] | None:
            return None if self._is_off else site.add(args, output, self._tokens, self._seed)

        def note_tokens(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            """Also where the layer is computed again for the backward pass, in the midst of other micro-batches."""
            packed = kwargs.get("packed_seq_params")
            self._tokens = packed.tokens if isinstance(packed, KeyedSeqParams) else None

        def begin_graph(embedding: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            if torch.is_grad_enabled() and self._active is not None and not self._is_off:
                output.requires_grad_(True)

        for _, site in self._sites:
            yield site.linear.register_forward_hook(lambda linear, args, output, site=site: add(site, args, output))
        layout = self._mesh.layout
        for chunk in self._chunks:
            for layer in chunk.decoder.layers:
                yield layer.register_forward_pre_hook(note_tokens, with_kwargs=True)
            # Recomputed layers, and a stage that has no LoRA, need an input with a gradient although all before it is frozen.
            if chunk.pre_process and (layout.recompute is Recompute.full or layout.pipeline_parallel > 1):
                yield chunk.embedding.register_forward_hook(begin_graph)


# --- what PEFT does -----------------------------------------------------------------------------------------------------


def _as_peft_does(architecture: Architecture, config: LoraConfig, name: str) -> tuple[LoraConfig, dict[str, Rank]]:
    """The config as PEFT completes it, and for each module's name what PEFT makes of it: told by PEFT itself, on the Hugging
    Face model without weights."""
    from peft.tuners.lora import LoraLayer

    elsewhere = "which backend=megatron cuts; write backend=transformers"
    if config.use_dora:
        raise ConfigError(f"adapter.dora=true reads whole weights, {elsewhere}")
    if config.modules_to_save:
        raise ConfigError(f"adapter.modules_to_save copies whole weights, {elsewhere}")
    peft_model = inject(_without_weights(architecture), config, name, empty=True)
    layers = {n: m for n, m in peft_model.get_base_model().named_modules() if isinstance(m, LoraLayer)}
    for module in filter(is_vocabulary_module, layers):
        raise ConfigError(f"adapter.target_modules names {module}, {elsewhere.replace('cuts', 'cuts along the vocabulary')}")
    own = peft_model.peft_config[name]
    ranks = {
        n: Rank(f"{PREFIX}{n}", layer.r[name], layer.scaling[name], own.lora_dropout, layer.in_features)
        for n, layer in layers.items()
    }
    return own, ranks


def _without_weights(architecture: Architecture) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(copy.deepcopy(architecture.config))


def _register(root: nn.Module, name: str, parameter: nn.Parameter) -> None:
    *path, last = name.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root._modules[part]
    root.register_parameter(last, parameter)
