"""Jobs of ``slurm/sweep.sbatch``: task N of the array is job N of the sweep.

Each task works out the same list of jobs from the same words, so none waits for another and no process has to stay alive.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from twinkle_research.config.checks import validate
from twinkle_research.config.composing import compose_with_hydra, without_hydra
from twinkle_research.errors import ConfigError
from twinkle_research.sweep.again import refuse_inside
from twinkle_research.sweep.checks import check_ranges
from twinkle_research.sweep.folder import ARRAY, SWEEP, Plan, Sweep, SweepJob
from twinkle_research.sweep.job import CONFIG, join_group, write_job
from twinkle_research.sweep.objective import objective_of


def prepare_task(path: Path, number: int, words: list[str]) -> Path:
    """Writes what task ``number`` runs (``job.yaml``; a task that comes back finds it) and, where no other has yet, sweep.json.
    Returns the run folder. Raises ConfigError where there is no such job."""
    words = [word for word in words if word not in ("-m", "--multirun") and not word.startswith("hydra.sweep.dir=")]
    check_words(words)
    parsed = OverridesParser.create().parse_overrides(words)
    check_ranges([own for own in parsed if own.is_sweep_override()])
    if any(
        own.is_interval_sweep() or own.is_sweep_override() and own.value().shuffle for own in parsed if not own.is_choice_sweep()
    ):
        raise ConfigError("an array has a fixed list of jobs: give each setting its values, a,b,c or choice(...) or range(...)")
    (jobs,) = BasicSweeper.split_arguments(parsed, None)
    if not 0 <= number < len(jobs):
        raise ConfigError(f"this sweep has {len(jobs)} jobs: there is no job {number}; submit it with --array=0-{len(jobs) - 1}")
    path = path.absolute()
    refuse_inside(path)
    folder = path / str(number)
    sweep_jobs = {n: SweepJob(n, list(job)) for n, job in enumerate(jobs)}
    if (path / SWEEP).is_file():
        check_same_sweep(path, sweep_jobs)
    if not (folder / CONFIG).is_file():
        cfg = without_hydra(compose_with_hydra(jobs[number]))
        OmegaConf.resolve(cfg)
        cfg.run_dir = str(folder)
        join_group(cfg, path.name)
        config = validate(cfg)
        keys = list(dict.fromkeys(own.get_key_element().lstrip("+") for own in parsed if own.is_sweep_override()))
        objective = objective_of(config)
        plan = Plan([*words, "-m"], os.getcwd(), ARRAY, "basic", keys)
        if objective is not None:
            plan.metric, plan.direction = objective.metric, objective.direction
        create(Sweep(path, plan, sweep_jobs))
        folder.mkdir(exist_ok=True)
        write_job(config)
    return folder


def check_words(words: list[str]) -> None:
    for word in words:
        key = word.lstrip("+~").partition("=")[0]
        if key == "run_dir":
            raise ConfigError("run_dir is one folder, and a sweep makes one a job: give hydra.sweep.dir=<folder> instead")
        if key.startswith(("hydra/", "hydra.")) and key != "hydra.searchpath":
            raise ConfigError(f"'{key}' has no effect in an array, whose jobs Slurm starts; use python train.py -m for it")


def create(sweep: Sweep) -> None:
    """Whole or not at all, by the first task that comes here. Raises ConfigError where another sweep is there."""
    sweep.path.mkdir(parents=True, exist_ok=True)
    mine = sweep.path.with_name(f".{sweep.path.name}.{secrets.token_hex(4)}")
    mine.mkdir()
    try:
        Sweep(mine, sweep.plan, sweep.jobs).save()
        os.link(mine / SWEEP, sweep.path / SWEEP)
    except FileExistsError:
        check_same_sweep(sweep.path, sweep.jobs)
    finally:
        (mine / SWEEP).unlink(missing_ok=True)
        mine.rmdir()


def check_same_sweep(path: Path, jobs: dict[int, SweepJob]) -> None:
    there = Sweep.load(path).jobs
    for number in sorted({*there, *jobs}):
        old, new = (" ".join(found[number].overrides) if number in found else "nothing" for found in (there, jobs))
        if old != new:
            raise ConfigError(
                f"{path} holds another sweep (its job {number} is {old}, not {new}): give its words, or another hydra.sweep.dir"
            )
