"""One run on one rank: build the parts from the config, continue from a checkpoint where there is one, train."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from twinkle_research.checkpoint.format import CheckpointReader
from twinkle_research.checkpoint.manager import CheckpointManager, newest_checkpoint
from twinkle_research.dataloader import build_loader
from twinkle_research.dataset.build import build_datasets, encoded_cache
from twinkle_research.dataset.config import OnChange
from twinkle_research.dataset.features import Features
from twinkle_research.errors import CheckpointError, DataError, Stopped
from twinkle_research.loss import build_loss
from twinkle_research.model.prepare import resolve_model_folder
from twinkle_research.model.transformers import TransformersModel
from twinkle_research.template import build_template
from twinkle_research.tracking.build import build_tracker
from twinkle_research.trainer.evaluation import Evaluation
from twinkle_research.trainer.preview import print_preview
from twinkle_research.trainer.sft import SftTrainer, total_steps
from twinkle_research.trainer.timing import StepClock

if TYPE_CHECKING:
    from twinkle_research.dataset import IterableDataset
    from twinkle_research.distributed.runtime import Runtime
    from twinkle_research.template import Template
    from twinkle_research.tracking.build import Tracker
    from twinkle_research.trainer.config import TrainConfig
    from twinkle_research.trainer.rundir import RunFolder


def run(cfg: TrainConfig, runtime: Runtime, folder: RunFolder) -> dict[str, Any]:
    """Trains (or, with ``eval_only``, evaluates) and returns ``step`` and ``objective``. Collective.

    Raises Stopped after a checkpoint has been saved on request, and UserError for what the user can mend.
    """
    model_folder = resolve_model_folder(cfg.model)
    template = build_template(cfg.data, model_folder)
    train_rows, eval_rows, fingerprint = load_rows(cfg, template, runtime)
    if cfg.data.preview and runtime.is_main:
        print_preview(train_rows, template, cfg.data.preview)
    model = TransformersModel.from_config(cfg, model_folder, runtime)
    evaluation = Evaluation(model, template, runtime, eval_rows, cfg.data.sample_prompts, cfg.trainer.sample_max_tokens)
    checkpoints = CheckpointManager(folder, cfg.checkpoint, runtime)
    start = find_start(cfg, checkpoints, runtime)
    if cfg.eval_only:
        return evaluate_only(model, evaluation, start, runtime, folder)

    rank, size = model.data_parallel
    loader = build_loader(
        train_rows, batch_size=cfg.trainer.batch_size, shuffle=cfg.data.shuffle, seed=cfg.seed, dp_rank=rank, dp_size=size
    )
    steps = total_steps(cfg.trainer, loader.steps_per_epoch)
    model.set_loss(build_loss(cfg.loss))
    model.set_optimizer(cfg.optimizer)
    model.set_lr_scheduler(cfg.scheduler, total_steps=steps)

    state = own_state(start, folder)
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
        configs = model.get_train_configs()
        clock = StepClock(runtime.device, configs.total_parameters, configs.trainable_parameters, runtime.world_size)
        trainer = SftTrainer(cfg.trainer, runtime, model, loader, evaluation, checkpoints, tracker, clock, steps, fingerprint)
        if start is not None:
            trainer.restore(CheckpointReader(start), start, restart_data=cfg.data.on_change is OnChange["restart"])
        rows = train_rows.rows_per_epoch if isinstance(train_rows, Features) else None
        for text in remarks(cfg, start, state, steps, reached, rows):
            tracker.message(text)
        return trainer.fit()


def load_rows(cfg: TrainConfig, template: Template, runtime: Runtime) -> tuple[Features | IterableDataset, Features | None, str]:
    """(training rows, held-out rows, fingerprint of the training rows). Collective.

    One rank of each machine encodes what is not encoded yet, while the others wait for it.
    """
    session = runtime.broadcast_object(uuid4().hex if runtime.is_main else None)
    cache = encoded_cache(cfg.data, session, first=runtime.local_rank == 0)
    try:
        train_rows, eval_rows = build_datasets(cfg.data, template, cfg.seed, cache)
        fingerprints = runtime.gather_objects(train_rows.fingerprint)
    finally:
        cache.release()  # all ranks have what they need, or one has failed
    if len(set(fingerprints)) > 1:
        raise DataError(
            "the ranks have different training rows: the files differ between the machines, or data.processor gives other rows "
            "for the same input from one time to the next"
        )
    return train_rows, eval_rows, fingerprints[0]


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
    model: TransformersModel, evaluation: Evaluation, start: Path | None, runtime: Runtime, folder: RunFolder
) -> dict[str, Any]:
    """Measures a checkpoint and writes ``evaluation.json`` into the run folder; nothing else there changes."""
    if start is None:
        raise CheckpointError(f"eval_only=true needs a checkpoint: {folder.path} has none, and resume= names none")
    reader = CheckpointReader(start)
    state = reader.json("trainer_state.json")
    model.load_state(reader, state["model"], load_optimizer=False)
    result = {"checkpoint": str(start), "step": state["step"], **evaluation.metrics()}
    answers = evaluation.answers()
    if runtime.is_main:
        folder.write_json("evaluation.json", result | {"samples": answers})
        print(json.dumps(result, indent=1))
        for answer in answers:
            print(f"\n> {answer['prompt']}\n{answer['completion']}")
    return result | {"objective": result.get("eval/loss")}
