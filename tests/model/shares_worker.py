"""One of two processes that work on the same rows together, as those of a tensor-parallel model do: what the trainer adds up.

``main`` runs in each of them (see ranks.py); the test runs ``measured`` in a single process.
"""

import json
from pathlib import Path
from typing import Any

from tiny_models import make_rows

from twinkle_research.advantage.grpo import GRPOAdvantage
from twinkle_research.checkpoint.config import CheckpointConfig
from twinkle_research.checkpoint.format import CheckpointReader
from twinkle_research.checkpoint.manager import CheckpointManager
from twinkle_research.distributed.runtime import Runtime
from twinkle_research.loss import resolve_loss
from twinkle_research.model.megatron.mesh import Shares
from twinkle_research.model.transformers import TransformersModel
from twinkle_research.rollout.batch import Completion, RolloutBatch
from twinkle_research.tracking.build import Tracker
from twinkle_research.trainer.config import TrainerConfig
from twinkle_research.trainer.evaluation import Evaluation
from twinkle_research.trainer.experience import Experience
from twinkle_research.trainer.loop import TrainingLoop
from twinkle_research.trainer.preference import PairEvaluation, PairInputs
from twinkle_research.trainer.rundir import RunFolder
from twinkle_research.trainer.timing import StepClock

ROWS = make_rows(6, masked=0.2)


class Together(TransformersModel):
    """Of the two processes the second speaks for the share."""

    @property
    def data_parallel(self) -> tuple[int, int]:
        return 0, 1

    @property
    def shares(self) -> Runtime:
        return Shares(self.runtime, 0, 1, speaks=self.runtime.rank == 1)


class Step(TrainingLoop):
    """The end of an optimizer step."""

    def fit(self) -> dict[str, Any]:
        with self.clock.part("train"):
            pass
        self.finish_step({}, tokens=sum(row["length"] for row in ROWS))
        return {}

    def data_state(self) -> dict[str, Any]:
        return {}

    def load_data_state(self, state: dict[str, Any], reader: CheckpointReader) -> None:
        """There is none."""


class LastTiming:
    """A sink of the tracker."""

    def log_step(self, row: dict[str, Any], timing: dict[str, Any]) -> None:
        self.tokens = timing["tokens_per_second"] * timing["time/train"]


def measured(model: TransformersModel) -> dict[str, Any]:
    clock = StepClock(model.runtime.device, 1, 1, model.runtime.world_size)
    return supervised(model) | of_pairs(model) | of_rollouts(model, clock) | {"tokens": tokens_of_a_step(model, clock)}


def supervised(model: TransformersModel) -> dict[str, Any]:
    model.set_loss("CrossEntropyLoss")
    count = model.count(ROWS)
    model.forward_backward(ROWS, normalizer=count)
    model.training_state().discard_window()
    row = model.calculate_metric(is_training=True).result
    evaluation = Evaluation(model, None, model.runtime, ROWS, [], 1).metrics(0)
    return {"count": count, "row": row, "evaluation": evaluation}


def of_pairs(model: TransformersModel) -> dict[str, Any]:
    loss = resolve_loss("kto_pair")
    model.set_loss(loss)
    pairs = [[ROWS[i], ROWS[i + 1]] for i in range(0, len(ROWS), 2)]
    inputs = PairInputs(model, loss)
    evaluation = PairEvaluation(model, None, model.runtime, pairs, [], 1, inputs)
    return {"baselines": inputs.baselines([3.0, -1.0, 3]), "pairs": evaluation.metrics(0)}


def of_rollouts(model: TransformersModel, clock: StepClock) -> dict[str, Any]:
    experience = Experience(
        model, clock, GRPOAdvantage(), batch_size=1, prompts_per_step=3, inner_epochs=1, seed=0, needs_reference=False,
        needs_values=False, reference_every=None, replay_dropout=False, log_completions=0,
    )  # fmt: skip
    completions = [
        Completion(i // 2, i % 2, {**row}, [-1.0] * sum(label != -100 for label in row["labels"]), "", "stop", reward=float(i))
        for i, row in enumerate(ROWS)
    ]
    batch = RolloutBatch(0, 2, completions, 3, 0, 0.0, {})
    experience.complete(batch)
    return {"old": [c.old_logprobs for c in completions], "own": [len(f["input_ids"]) for f in experience.share(completions)[0]]}


def tokens_of_a_step(model: TransformersModel, clock: StepClock) -> float:
    last, nowhere = LastTiming(), RunFolder(Path("no/such/folder"))
    Step(
        TrainerConfig("sft"), model.runtime, model, Evaluation(model, None, model.runtime, None, [], 1),
        CheckpointManager(nowhere, CheckpointConfig(every=None), model.runtime), Tracker(nowhere.path, [last], None), clock,
        total_steps=2, data_fingerprint="",
    ).fit()  # fmt: skip
    return last.tokens


def main(runtime: Runtime, model_folder: str, folder: str) -> None:
    found = measured(Together(model_folder, seed=4, runtime=runtime))
    Path(folder, f"{runtime.rank}.json").write_text(json.dumps(found))
