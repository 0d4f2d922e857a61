"""Evaluation of a supervised run: loss and perplexity on held-out rows, greedy answers to a few prompts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from twinkle_research.data_format import IGNORE_INDEX, SamplingParams
from twinkle_research.sampler.transformers import TransformersSampler

if TYPE_CHECKING:
    from twinkle_research.dataset import Dataset
    from twinkle_research.distributed.runtime import Runtime
    from twinkle_research.model.base import TwinkleModel
    from twinkle_research.template import Template

ROWS_PER_CALL = 64  # the model cuts them into its own micro-batches


class Evaluation:
    """What is measured before training, every ``trainer.eval_every`` steps and after the last step."""

    def __init__(
        self,
        model: TwinkleModel,
        template: Template,
        runtime: Runtime,
        dataset: Dataset | None,
        prompts: Sequence[str],
        max_tokens: int,
    ):
        self.model = model
        self.template = template
        self.runtime = runtime
        self.dataset = dataset
        self.prompts = list(prompts)
        self.max_tokens = max_tokens

    @property
    def has_work(self) -> bool:
        return self.dataset is not None or bool(self.prompts)

    def metrics(self, step: int) -> dict[str, float]:
        """``eval/loss`` (nats per trained token, whatever the training loss adds) and ``eval/perplexity``. Collective."""
        if self.dataset is None:
            return {}
        rank, size = self.model.data_parallel
        rows = range(rank, len(self.dataset), size)
        nll, tokens = 0.0, 0
        # As many calls on every rank: they are collective where the model is sharded.
        for start in range(0, -(-len(self.dataset) // size), ROWS_PER_CALL):
            features = [self.dataset[i] for i in rows[start : start + ROWS_PER_CALL]]
            logps = self.model.forward_only(features).result["logps"]
            for feature, row in zip(features, logps, strict=True):
                trained = [value for label, value in zip(feature["labels"], row, strict=True) if label != IGNORE_INDEX]
                nll -= math.fsum(trained)
                tokens += len(trained)
        nll, tokens = self.model.shares.all_reduce_sum(nll), self.model.shares.all_reduce_sum(tokens)
        loss = nll / tokens
        return {"eval/loss": loss, "eval/perplexity": math.exp(min(loss, 700.0))}

    def objective(self, metrics: dict[str, float]) -> float | None:
        return metrics.get("eval/loss")

    cost = objective

    def answers(self) -> list[dict[str, Any]]:
        """Greedy answers to the prompts, as rows for samples.jsonl. Where the model is whole only rank 0 generates, and the
        others get []; where it is sharded all generate the same. Collective."""
        if not self.prompts or not (self.runtime.is_main or self.model.is_sharded):
            return []
        trajectories = [{"prompt": prompt} for prompt in self.prompts]
        with self.model.sampling() as module:
            sampler = TransformersSampler(module, self.template)
            responses = sampler.sample(trajectories, SamplingParams(temperature=0.0, max_tokens=self.max_tokens))
        return [
            {"prompt": prompt, "completion": response.sequences[0].decoded, "stop_reason": response.sequences[0].stop_reason}
            for prompt, response in zip(self.prompts, responses, strict=True)
        ]
