"""The trainer's weights into the engine, in place, and the proof that they arrived."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from twinkle_research.data_format import IGNORE_INDEX, InputFeature
from twinkle_research.distributed.runtime import Runtime
from twinkle_research.errors import UserError
from twinkle_research.randomness import derive_seed
from twinkle_research.sampler.adapter import EngineAdapter
from twinkle_research.sampler.engine import Engine, Request
from twinkle_research.sampler.requests import scoring_params
from twinkle_research.sampler.weightmap import WeightMap, tagged

if TYPE_CHECKING:
    from twinkle_research.model.base import TwinkleModel

_PROBE_TOKENS = 6
# Mean difference of the probe's log-probabilities between trainer and engine that rounding explains, by the coarser of their
# dtypes. On random text, where it is largest, SmolLM2-135M has 1e-5 in float32 and 0.09 (single tokens 1.1) in bfloat16.
PROBE_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.5}


class WeightSync:
    """One for each engine. ``adapter``: where a LoRA is sent beside the weights, which the engine has from its folder."""

    def __init__(self, engine: Engine, runtime: Runtime, *, canary: bool, tensor_parallel: int, as_adapter: bool) -> None:
        self.engine = engine
        self.runtime = runtime
        self.canary = canary
        self.adapter = EngineAdapter(engine) if as_adapter else None
        self._ranks = tensor_parallel
        self._map: WeightMap | None = None
        self._dtypes = {engine.config.dtype}

    @property
    def lora(self) -> Any | None:
        """The adapter that requests are to name."""
        return None if self.adapter is None else self.adapter.request

    # --- the weights ------------------------------------------------------------------------------------------------

    def push(self, model: TwinkleModel) -> dict[str, float]:
        """Each tensor goes straight into its place: no copy on disk, and beyond its own shard no rank holds more than one
        tensor of the trainer at a time. Returns seconds. UserError, naming a tensor, where the engine does not have it
        afterwards."""
        start = time.perf_counter()
        sent: dict[str, Tensor] = {}
        if self.adapter is not None:
            self._push_adapter(self.adapter, model, sent)
            targets = self.adapter.targets()
        else:
            targets = {name: p.detach() for name, p in self.engine.model.named_parameters()}
            if self.canary and self._map is None:
                self._map = self._explore(model, targets)
            self._load(self._watched(model.disk_weights(), sent))
        pushed = time.perf_counter()
        if self._map is not None:
            self._compare(sent, self._map.read(targets))
        return {"sync/push_seconds": pushed - start, "sync/check_seconds": time.perf_counter() - pushed}

    def _load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        with self.engine.model_in_place() as module:
            try:
                module.load_weights(weights)
            except (ValueError, KeyError) as error:  # a name or a shape that the loader does not know
                raise UserError(f"vLLM cannot take over the trainer's weights: {error}; write sampler=transformers") from error

    def _watched(self, weights: Iterable[tuple[str, Tensor]], sent: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Fills ``sent`` with checksums of what passes, in the engine's dtype."""
        for name, tensor in weights:
            self._dtypes.add(tensor.dtype)
            if self._map is not None:
                tensor = tensor.detach().to(self._map.dtypes.get(name, tensor.dtype))
                sent[name] = self._map.checksum(name, tensor)
            yield name, tensor

    def _explore(self, model: TwinkleModel, targets: Mapping[str, Tensor]) -> WeightMap:
        shapes = {name: tensor.shape for name, tensor in model.disk_weights()}
        with torch.no_grad():
            for target in targets.values():
                target.zero_()
        self._load(tagged(shapes, self.engine.device))
        found = WeightMap(shapes, targets, complete=True)
        found.set_counts(self._of_engine(found.counts))
        return found

    def _push_adapter(self, adapter: EngineAdapter, model: TwinkleModel, sent: dict[str, Tensor]) -> None:
        config, tensors = model.get_train_configs().adapter, dict(model.get_state_dict())
        if config is None:
            raise UserError("sampler.lora=adapter sends an adapter, but the model has none")
        self._dtypes.update(tensor.dtype for tensor in tensors.values())
        if self.canary and self._map is None:
            shapes = {name: tensor.shape for name, tensor in tensors.items()}
            adapter.load(dict(tagged(shapes, self.engine.device)), adapter.unscaled(config))
            self._map = WeightMap(shapes, adapter.targets(), complete=False)
            self._map.set_counts(self._of_engine(self._map.counts))
        arriving = adapter.load(tensors, config)
        if self._map is not None:
            sent.update({name: self._map.checksum(name, tensor) for name, tensor in arriving.items()})

    # --- the canary -------------------------------------------------------------------------------------------------

    def _of_engine(self, mine: list[int]) -> list[list[int]]:
        """Those of all ranks that share this rank's engine."""
        if self._ranks == 1:
            return [mine]
        first = self.runtime.rank // self._ranks * self._ranks
        return self.runtime.gather_objects(mine)[first : first + self._ranks]

    def _compare(self, sent: Mapping[str, Tensor], mine: list[int]) -> None:
        differing = self._map.differing(sent, self._of_engine(mine))
        if self.runtime.any(bool(differing)):
            which = f"{differing[0]} ({len(differing)} of {len(sent)} tensors differ)" if differing else "those of another rank"
            raise UserError(f"the sampler does not have the trainer's weights after a sync, by their checksums: {which}")

    def probe(self, model: TwinkleModel) -> dict[str, float]:
        """Compares the log-probabilities of a short fixed text. UserError where they differ by more than rounding."""
        ids = probe_ids(self.engine)
        if not self.canary or len(ids) < 2:
            return {}
        start = time.perf_counter()
        row: InputFeature = {"input_ids": ids, "labels": [*ids[1:], IGNORE_INDEX], "length": len(ids)}
        trainer = model.policy_scores([row])["logps"][0][:-1]
        request = Request(ids, scoring_params(0), lora=self.lora)
        self.engine.run([request])
        engine = [entries[0][1] for entries in request.prompt_logprobs[1:]]
        gap = math.fsum(abs(ours - theirs) for ours, theirs in zip(trainer, engine, strict=True)) / len(engine)
        coarsest = max(self._dtypes, key=lambda dtype: torch.finfo(dtype).eps)
        if self.runtime.any(not gap <= PROBE_TOLERANCE[coarsest]):
            raise UserError(
                f"trainer and sampler disagree after a sync: log-probabilities of one text differ by {gap:.3g} on average, more "
                f"than the {PROBE_TOLERANCE[coarsest]:g} of {coarsest}, though the weights are the same by their checksums"
            )
        return {"sync/probe_gap": gap, "sync/probe_seconds": time.perf_counter() - start}


def probe_ids(engine: Engine) -> list[int]:
    """A fixed text of random tokens."""
    count = min(_PROBE_TOKENS, engine.max_model_len - 1)
    return [derive_seed(0, "probe", i) % engine.vocab_size for i in range(count)]
