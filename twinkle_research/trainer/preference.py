"""What losses on pairs of answers need beside a step's rows, and what is measured on held-out pairs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from twinkle_research.data_format import InputFeature
from twinkle_research.trainer.evaluation import ROWS_PER_CALL, Evaluation

if TYPE_CHECKING:
    from twinkle_research.dataset.pairs import Pairs
    from twinkle_research.distributed.runtime import Runtime
    from twinkle_research.loss.preference import PreferenceLoss
    from twinkle_research.model.base import TwinkleModel
    from twinkle_research.template import Template


class PairInputs:
    """``ref_logps``, and ``baselines`` for a loss that wants them, of rows that come in pairs: chosen, rejected, ...

    The reference is what the run started from: the base without the adapter, or a frozen copy where all weights are trained.
    """

    def __init__(self, model: TwinkleModel, loss: PreferenceLoss):
        self.model = model
        self.needs_baselines = loss.needs_baselines
        model.set_reference("base" if model.get_train_configs().adapter_name else "frozen")

    def __call__(self, features: Sequence[InputFeature]) -> dict[str, Any]:
        """``features``: this rank's share of a step. Collective."""
        found = {"ref_logps": self.model.reference_logps(features)}
        if self.needs_baselines:
            found["baselines"] = self.baselines(self.divergence(features, found["ref_logps"])) * (len(features) // 2)
        return found

    def divergence(self, features: Sequence[InputFeature], ref_logps: Sequence[Sequence[float]]) -> list[float]:
        """[log-ratio of policy to reference summed over the chosen answers, over the rejected ones, number of pairs], of this
        rank. Collective."""
        logps = self.model.policy_scores(features)["logps"]
        ratios = [math.fsum(a - b for a, b in zip(row, ref, strict=True)) for row, ref in zip(logps, ref_logps, strict=True)]
        return [math.fsum(ratios[::2]), math.fsum(ratios[1::2]), len(ratios) // 2]

    def baselines(self, sums: Sequence[float]) -> list[float]:
        """What a chosen row and a rejected row are compared with, from each rank's ``divergence``: the mean log-ratio of the
        answers of the other kind, at least 0. Collective."""
        chosen, rejected, pairs = (self.model.shares.all_reduce_sum(float(value)) for value in sums)
        return [max(0.0, rejected / max(pairs, 1)), max(0.0, chosen / max(pairs, 1))]


class PairEvaluation(Evaluation):
    """The preference loss itself, and how often the chosen answer has the higher reward. ``inputs``: None for a loss that needs
    nothing beside the rows."""

    def __init__(
        self,
        model: TwinkleModel,
        template: Template,
        runtime: Runtime,
        dataset: Pairs | None,
        prompts: Sequence[str],
        max_tokens: int,
        inputs: PairInputs | None,
    ):
        super().__init__(model, template, runtime, dataset, prompts, max_tokens)
        self.inputs = inputs

    def metrics(self, step: int) -> dict[str, float]:
        """``eval/loss``, ``eval/accuracy`` and ``eval/rewards/...`` as they are called in training. Collective."""
        if self.dataset is None:
            return {}
        baselines = self._baselines()
        for features in self._calls():
            given: dict[str, Any] = {}
            if self.inputs is not None:
                given["ref_logps"] = self.model.reference_logps(features)
            if baselines is not None:
                given["baselines"] = baselines * (len(features) // 2)
            self.model.forward_only(features, **given)
        found = self.model.calculate_metric(is_training=False).result
        rewards = {f"eval/{name}": found[name] for name in ("rewards/chosen", "rewards/rejected", "rewards/margins")}
        return {"eval/loss": found["loss"], "eval/accuracy": found["rewards/accuracies"], **rewards}

    def _baselines(self) -> list[float] | None:
        """Over all held-out pairs, so that it does not depend on the number of ranks."""
        if self.inputs is None or not self.inputs.needs_baselines:
            return None
        parts = [self.inputs.divergence(features, self.model.reference_logps(features)) for features in self._calls()]
        return self.inputs.baselines([math.fsum(column) for column in zip(*parts, strict=True)])

    def _calls(self) -> Iterator[list[InputFeature]]:
        """This rank's pairs, in as many calls on every rank: they are collective where the model is sharded."""
        rank, size = self.model.data_parallel
        pairs = range(rank, len(self.dataset), size)
        for start in range(0, -(-len(self.dataset) // size), ROWS_PER_CALL):
            yield [feature for i in pairs[start : start + ROWS_PER_CALL] for feature in self.dataset[i]]
