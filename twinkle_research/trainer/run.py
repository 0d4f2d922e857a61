"""One run on one rank: build the parts from the config, continue from a checkpoint where there is one, train."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from twinkle_research.checkpoint.format import CheckpointReader
from twinkle_research.checkpoint.manager import CheckpointManager, newest_checkpoint
from twinkle_research.config.inputs import against_model
from twinkle_research.config.startchecks import differences
from twinkle_research.dataset.config import OnChange
from twinkle_research.errors import CheckpointError, ConfigError, Stopped
from twinkle_research.model.build import build_model
from twinkle_research.model.facts import read_facts
from twinkle_research.model.prepare import resolve_model_folder
from twinkle_research.template import build_template
from twinkle_research.tracking.build import build_tracker
from twinkle_research.trainer.config import RlTrainerConfig
from twinkle_research.trainer.timing import StepClock

if TYPE_CHECKING:
    from twinkle_research.distributed.runtime import Runtime
    from twinkle_research.model.base import TwinkleModel
    from twinkle_research.template import Template
    from twinkle_research.tracking.build import Tracker
    from twinkle_research.trainer.config import TrainConfig
    from twinkle_research.trainer.loop import Measures, TrainingLoop
    from twinkle_research.trainer.rundir import RunFolder


class Parts(Protocol):
    """What differs between the two loops. Made before the model is loaded, so that bad data costs no loading. Collective."""

    fingerprint: str  # of the data
    evaluation: Measures

    def __init__(self, cfg: TrainConfig, template: Template, runtime: Runtime) -> None: ...
    def attach(self, model: TwinkleModel, model_folder: Path, clock: StepClock) -> None:
        """Gives the model its loss and what else it trains with, and makes the evaluation."""

    @property
    def rows_per_epoch(self) -> int | None: ...
    def steps(self) -> int:
        """Optimizer steps of the whole run."""

    def loop(self, **common: Any) -> TrainingLoop: ...
    def close(self) -> None: ...


def run(cfg: TrainConfig, runtime: Runtime, folder: RunFolder) -> dict[str, Any]:
    """Trains (or, with ``eval_only``, evaluates) and returns ``step`` and ``objective``. Collective.

    Raises Stopped after a checkpoint has been saved on request, and UserError for what the user can mend.
    """
    model_folder = resolve_model_folder(cfg.model)
    if problems := list(against_model(cfg, read_facts(model_folder))):  # found by the plan already, where the model was here
        raise ConfigError("\n".join(problems))
    template = build_template(cfg.data, model_folder)
    parts = _parts(cfg)(cfg, template, runtime)
    model = build_model(cfg, model_folder, runtime)
    model.set_template(template)  # its tokenizer goes into the checkpoints
    configs = model.get_train_configs()
    clock = StepClock(runtime.device, configs.total_parameters, configs.trainable_parameters, runtime.world_size)
    with closing(model), closing(parts):
        checkpoints = CheckpointManager(folder, cfg.checkpoint, runtime)  # may make a process group: before vLLM comes
        parts.attach(model, model_folder, clock)
        start = find_start(cfg, checkpoints, runtime)
        if cfg.eval_only:
            return evaluate_only(model, parts.evaluation, start, runtime, folder)
        return train(cfg, runtime, folder, parts, model, clock, checkpoints, start)


def _parts(cfg: TrainConfig) -> type[Parts]:
    if isinstance(cfg.trainer, RlTrainerConfig):
        from twinkle_research.trainer.reinforced import ReinforcedParts

        return ReinforcedParts
    from twinkle_research.trainer.supervised import SupervisedParts

    return SupervisedParts


def train(
    cfg: TrainConfig, runtime: Runtime, folder: RunFolder, parts: Parts, model: TwinkleModel, clock: StepClock,
    checkpoints: CheckpointManager, start: Path | None,
) -> dict[str, Any]:  # fmt: skip
    steps = parts.steps()
    model.set_optimizer(cfg.optimizer)
    model.set_lr_scheduler(cfg.scheduler, total_steps=steps)
    state = own_state(start, folder)
    if start is not None and not state and CheckpointReader(start).step >= steps:
        raise ConfigError(
            f"resume={cfg.resume}: {start} is at step {CheckpointReader(start).step} already, and this run ends at step {steps}; "
            "steps and epochs count from the start of that run: give more"
        )
    reached = folder.last_step()  # by an earlier attempt; the tracker cuts it back to the checkpoint
    tracker = build_tracker(
        cfg,
        folder,
        total_steps=steps,
        resume_step=state.get("step", 0),
        wandb_run_id=state.get("wandb_run_id"),
        is_main=runtime.is_main,
    )
    with outcome(tracker):
        loop = parts.loop(
            cfg=cfg.trainer, runtime=runtime, model=model, evaluation=parts.evaluation, checkpoints=checkpoints,
            tracker=tracker, clock=clock, total_steps=steps, data_fingerprint=parts.fingerprint,
        )  # fmt: skip
        if start is not None:
            loop.restore(CheckpointReader(start), start, restart_data=cfg.data.on_change is OnChange["restart"])
        for text in remarks(cfg, start, state, steps, reached, parts.rows_per_epoch):
            tracker.message(text)
        return loop.fit()


def remarks(
    cfg: TrainConfig, start: Path | None, state: dict[str, Any], steps: int, reached: int, rows: int | None
) -> Iterator[str]:
    """What a person may not expect. ``state``: of this run's own checkpoint, {} if it has none; ``reached``: the step that
    an earlier attempt in this folder came to; ``rows``: training rows of an epoch, where that is known."""
    if rows is not None and cfg.trainer.batch_size > rows:
        yield f"trainer.batch_size={cfg.trainer.batch_size} is more than the {rows} rows: each step has all of them"
    if start is None and reached:
        yield f"an earlier attempt reached step {reached} without a checkpoint: this one starts from the beginning"
    if start is not None:
        step = CheckpointReader(start).step
        yield f"continuing from {start} at step {step} of {steps}"
        if not state and (changed := differences(start, cfg)):
            yield f"settings that differ from those of that run: {', '.join(changed)}"
    if state and cfg.resume not in ("auto", "never"):
        yield f"resume={cfg.resume} is not used: this run has a checkpoint of its own, and continues from that"
    decays = cfg.scheduler.name != "constant" and cfg.scheduler.total_steps is None
    if state and decays and state["total_steps"] != steps:
        yield (
            f"the run now ends at step {steps} instead of {state['total_steps']}, and the decay of the learning rate with it: "
            f"lr jumps here. To keep the old decay set scheduler.total_steps={state['total_steps']} from the start."
        )


def find_start(cfg: TrainConfig, checkpoints: CheckpointManager, runtime: Runtime) -> Path | None:
    """The checkpoint to continue from: the run folder's own newest, else the one that ``resume`` names. Collective."""

    def choose() -> Path | None:
        own = checkpoints.latest()
        if own is not None or cfg.resume in ("auto", "never"):
            return own
        return newest_checkpoint(Path(cfg.resume))

    return runtime.broadcast_object(choose() if runtime.is_main else None)


def own_state(start: Path | None, folder: RunFolder) -> dict[str, Any]:
    """trainer_state.json of a checkpoint of this very run; a run started from another's checkpoint has its own records."""
    if start is None or not start.resolve().is_relative_to(folder.path.resolve()):
        return {}
    return CheckpointReader(start).json("trainer_state.json")


@contextmanager
def outcome(tracker: Tracker) -> Iterator[None]:
    """Closes the trackers with how the run ended."""
    try:
        yield
    except Stopped:
        tracker.finish("stopped")
        raise
    except BaseException:
        tracker.finish("failed")
        raise
    tracker.finish("finished")


def evaluate_only(
    model: TwinkleModel, evaluation: Measures, start: Path | None, runtime: Runtime, folder: RunFolder
) -> dict[str, Any]:
    """Measures a checkpoint and writes ``evaluation.json`` into the run folder; nothing else there changes."""
    if start is None:
        raise CheckpointError(f"eval_only=true needs a checkpoint: {folder.path} has none, and resume= names none")
    reader = CheckpointReader(start)
    state = reader.json("trainer_state.json")
    model.load_state(reader, state["model"], load_optimizer=False)
    result = {"checkpoint": str(start), "step": state["step"], **evaluation.metrics(state["step"])}
    answers = evaluation.answers()
    if runtime.is_main:
        folder.write_json("evaluation.json", result | {"samples": answers})
        print(json.dumps(result, indent=1))
        for answer in answers:
            print(f"\n> {answer['prompt']}\n{answer['completion']}")
    return result | {"objective": evaluation.objective(result)}
