"""A sweep under Hydra: which jobs there are is its sweeper's business, how they are started, recorded and reported is ours.

``SweepRun.in_hydra`` puts ``SweepLauncher`` in the place of the launcher that ``hydra/launcher=`` names, whose settings it
reads, and the study of sweep/study.py in the place of Hydra's Optuna sweeper. So all launchers record the same, a failed job
ends nothing but itself, and jobs that are finished are not started again.
"""

from __future__ import annotations

import contextlib
import copy
import os
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from twinkle_research.config.composing import without_hydra
from twinkle_research.config.storage import to_object
from twinkle_research.distributed.env import WorldInfo
from twinkle_research.distributed.signals import StopSignals
from twinkle_research.errors import EXIT_INTERRUPTED, EXIT_STOPPED, ConfigError, UserError
from twinkle_research.sweep.again import check_same_jobs
from twinkle_research.sweep.checks import check_settings, refuse_intervals, swept
from twinkle_research.sweep.console import closing_text
from twinkle_research.sweep.folder import SWEEP, Plan, Sweep, SweepJob, one_line
from twinkle_research.sweep.job import join_group, record_failure
from twinkle_research.sweep.local import run_side_by_side, slots_of
from twinkle_research.sweep.objective import Objective, objective_of
from twinkle_research.sweep.pages import write_page

LAUNCHERS = {
    "BasicLauncher": "basic",
    "JoblibLauncher": "joblib",
    "LocalLauncher": "submitit_local",
    "SlurmLauncher": "submitit_slurm",
}
SWEEPERS = {"BasicSweeper": "basic", "OptunaSweeper": "optuna"}
REPORT_SECONDS = 30.0

Start = Callable[[DictConfig, WorldInfo, bool], int]


class SweepRun:
    """One call that starts (or continues) a sweep. ``command``: its words; ``start(cfg, world, in_process)``: runs a job here;
    ``resume``: the jobs are those that the folder's sweep.json lists, and only what has not finished is run."""

    def __init__(self, command: Sequence[str], start: Start, world: WorldInfo, resume: bool = False) -> None:
        self.command = [word for word in command if not word.startswith("hydra.sweep.dir=")]
        self.start = start
        self.world = world
        self.resume = resume
        self.sweep: Sweep | None = None
        self.trials: int | None = None
        self.stop = StopSignals(lasting=True)
        self._objective: Objective | None = None
        self._lock = contextlib.ExitStack()
        self._reported = time.monotonic()

    @contextlib.contextmanager
    def in_hydra(self) -> Iterator[None]:
        """Within it Hydra's sweepers get our launcher."""
        make_launcher, make_sweeper = Plugins.instantiate_launcher, Plugins.instantiate_sweeper

        def own_launcher(
            plugins: Plugins, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
        ) -> Launcher:
            return SweepLauncher(self, hydra_context, config)

        def own_sweeper(
            plugins: Plugins, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
        ) -> Sweeper:
            check_settings(config)
            if _chosen(config.hydra.sweeper, SWEEPERS, "hydra/sweeper") == "basic":
                refuse_intervals(config)
                return make_sweeper(plugins, hydra_context=hydra_context, task_function=task_function, config=config)
            from twinkle_research.sweep.study import StudySweeper

            return StudySweeper(self, SweepLauncher(self, hydra_context, config), config)

        Plugins.instantiate_launcher, Plugins.instantiate_sweeper = own_launcher, own_sweeper  # type: ignore[method-assign]
        try:
            with self._lock, self._left_early():
                yield
        finally:
            Plugins.instantiate_launcher, Plugins.instantiate_sweeper = make_launcher, make_sweeper  # type: ignore[method-assign]

    @contextlib.contextmanager
    def _left_early(self) -> Iterator[None]:
        """What goes up through Hydra ends the sweep, which can be resumed."""
        try:
            yield
        except BaseException:
            if self.sweep is not None and self.sweep.state == "running":
                self.sweep.state = "stopped"
                self.sweep.save()
            raise

    # --- the record -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def opening(self, config: DictConfig, objective: Objective | None, keys: list[str]) -> Iterator[Sweep]:
        """Locks the folder of the sweep and reads what is there; nothing is written where the body refuses to go on with it.
        From then on a signal lets the job that runs come to its end, or to its checkpoint, and starts no other."""
        path = Path(config.hydra.sweep.dir).absolute()
        path.mkdir(parents=True, exist_ok=True)
        plan = Plan(
            self.command, os.getcwd(), _chosen(config.hydra.launcher, LAUNCHERS, "hydra/launcher"),
            _chosen(config.hydra.sweeper, SWEEPERS, "hydra/sweeper"), keys, trials=self.trials,
        )  # fmt: skip
        if objective is not None:
            plan.metric, plan.direction = objective.metric, objective.direction
        sweep = Sweep(path, plan)
        lock = sweep.lock()
        lock.acquire()
        self._lock.callback(lock.release)
        if (path / SWEEP).is_file():
            old = Sweep.load(path)
            old.refresh()
            sweep.jobs = old.jobs
            _check_same_kind(old.plan, plan, path)
        yield sweep
        self._lock.enter_context(self.stop)
        self.sweep, self._objective = sweep, objective
        sweep.save()

    def leave_if_asked(self) -> None:
        """Before a job is started."""
        if self.stop.requested:
            raise SystemExit(EXIT_STOPPED)

    def check_objective(self, objective: Objective | None) -> None:
        """Where the jobs have different objectives (a swept loss can do that), no job is the best."""
        if objective == self._objective:
            return
        if self.sweep.plan.sweeper == "optuna":
            raise ConfigError(
                f"this job's objective is {objective and objective.metric}, that of the study {self._objective.metric}"
            )
        self.sweep.plan.metric = self.sweep.plan.direction = None

    def update(self, job: SweepJob) -> None:
        """Called whenever a job begins or ends."""
        self.sweep.save()
        if job.state != "running" and time.monotonic() - self._reported > REPORT_SECONDS:
            self._reported = time.monotonic()
            write_page(self.sweep)

    def close(self, code: int = 0) -> int:
        """Writes what is known at the end and prints it; returns the exit code. Raises UserError that names the failed jobs."""
        sweep = self.sweep
        if sweep is None:
            return code
        failed = [job for job in sweep.jobs.values() if job.state in ("failed", "killed")]
        if not failed and any(job.state == "stopped" for job in sweep.jobs.values()):
            code = code or EXIT_STOPPED  # cancelled in the queue, and saved
        sweep.state = "stopped" if code else "failed" if failed else "finished"
        sweep.save()
        write_page(sweep)
        print(closing_text(sweep), flush=True)
        if failed and not code:
            lines = [
                f"{sweep.folder(job.number)} ({job.error or 'it left no account of why'}): {' '.join(job.overrides)}"
                for job in failed
            ]
            raise UserError("\n".join([f"{len(failed)} of the sweep's jobs failed", *lines]))
        return code


class SweepLauncher(Launcher):
    """Starts jobs in the way that ``hydra/launcher=`` names."""

    def __init__(self, run: SweepRun, context: HydraContext, config: DictConfig) -> None:
        self.run = run
        self.context = context
        self.config = config
        self._looked_at: tuple[list[str], DictConfig] | None = None
        self.kind = _chosen(config.hydra.launcher, LAUNCHERS, "hydra/launcher")
        self.settings: dict[str, Any] = OmegaConf.to_container(config.hydra.launcher, resolve=True)
        if self.kind == "joblib":
            slots_of(self.settings["n_jobs"])
        elif self.kind.startswith("submitit"):
            from twinkle_research.sweep.batch import check_settings as check_batch

            check_batch(self.kind, self.settings)

    def setup(self, **_: Any) -> None:
        """Nothing: __init__ has all."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        numbered = [(initial_job_idx + i, list(words)) for i, words in enumerate(job_overrides)]
        if self.config.get("dry_run"):
            for number, words in numbered:
                self.run.start(self.compose(SweepJob(number, words), Path(self.config.hydra.sweep.dir)), self.run.world, False)
            return [_returned(words, None) for _, words in numbered]
        values = self.launch_jobs(numbered)
        return [_returned(words, values[number]) for number, words in numbered]

    def launch_jobs(self, numbered: Sequence[tuple[int, list[str]]]) -> dict[int, float | None]:
        """Runs those jobs that have not finished; the objective of each, None where it has none."""
        if self.run.sweep is None:
            with self.run.opening(self.config, *self.first_look(numbered[0])) as found:
                if not self.run.resume:
                    check_same_jobs(found, numbered, self.compose)
        sweep = self.run.sweep
        jobs = []
        for number, words in numbered:
            old = sweep.jobs.get(number)
            if old is not None and (self.run.resume or old.overrides == words):
                job = old
            else:
                job = SweepJob(number, words)
            sweep.jobs[number] = job
            if job.state == "finished":
                print(f"{sweep.folder(number)}: this run is finished (step {job.step})")
            else:
                jobs.append(job)
        sweep.save()
        if jobs:
            self.run.leave_if_asked()
            self.run_jobs(jobs)
        return {number: sweep.jobs[number].objective for number, _ in numbered}

    def first_look(self, first: tuple[int, list[str]]) -> tuple[Objective | None, list[str]]:
        cfg = self.compose(SweepJob(*first), Path(self.config.hydra.sweep.dir))
        self._looked_at = (first[1], cfg)  # it is started next
        config = to_object(cfg)
        keys = dict.fromkeys(own.get_key_element().lstrip("+") for own in swept(self.config))
        return objective_of(config), list(keys)

    def run_jobs(self, jobs: list[SweepJob]) -> None:
        if self.kind == "basic":
            self.in_turn(jobs)
        elif self.kind == "joblib":
            run_side_by_side(self, jobs, int(self.settings["n_jobs"]))
        else:
            from twinkle_research.sweep.batch import run_as_batch_jobs

            run_as_batch_jobs(self, jobs)

    # --- one job --------------------------------------------------------------------------------------------------------

    def compose(self, job: SweepJob, sweep_dir: Path) -> DictConfig:
        """The job's whole configuration, interpolations resolved: a job that waits in a queue runs what was submitted."""
        if self._looked_at is not None and self._looked_at[0] == job.overrides:
            cfg, self._looked_at = self._looked_at[1], None
            return cfg
        words = [*job.overrides, f"hydra.sweep.subdir={job.number}"]
        config = self.context.config_loader.load_sweep_config(self.config, words)
        with open_dict(config):
            config.hydra.job.id, config.hydra.job.num = str(job.number), job.number
        known = HydraConfig.instance()
        before, known.cfg = known.cfg, copy.copy(config)
        try:
            cfg = without_hydra(config)
            OmegaConf.resolve(cfg)
        finally:
            known.cfg = before
        cfg.run_dir = str(sweep_dir.absolute() / str(job.number))
        join_group(cfg, sweep_dir.absolute().name)
        return cfg

    def prepare(self, job: SweepJob) -> DictConfig | None:
        """As ``compose``; None, and the job has failed, where its configuration is refused."""
        try:
            cfg = self.compose(job, self.run.sweep.path)
            self.run.check_objective(objective_of(to_object(cfg)))
        except UserError as error:
            self.refused(job, error)
            return None
        self.run.sweep.folder(job.number).path.mkdir(exist_ok=True)
        return cfg

    def refused(self, job: SweepJob, error: Exception) -> None:
        record_failure(self.run.sweep.folder(job.number), error)
        job.state, job.error = "failed", one_line(error)
        self.run.update(job)

    def begin(self, job: SweepJob) -> float:
        job.state, job.error, job.objective, job.seconds = "running", None, None, None
        self.run.update(job)
        return time.monotonic()

    def end(self, job: SweepJob, code: int, began: float | None) -> None:
        """Takes the outcome from the run folder; ``code``: the exit code, which counts where the folder says nothing."""
        job.state = {0: "finished", EXIT_STOPPED: "stopped", EXIT_INTERRUPTED: "stopped"}.get(code, "failed")
        self.run.sweep.look_at(job)
        if code not in (0, EXIT_STOPPED, EXIT_INTERRUPTED) and job.state != "failed":
            job.state = "failed"
        if job.state == "failed" and job.error is None:
            job.error = f"exit code {code}"
        if began is not None:
            job.seconds = round(time.monotonic() - began, 3)
        self.run.update(job)

    def in_turn(self, jobs: list[SweepJob]) -> None:
        for job in jobs:
            cfg = self.prepare(job)
            if cfg is None:
                continue
            self.run.leave_if_asked()
            print(f"job {job.number}: {' '.join(job.overrides)}", flush=True)
            began = self.begin(job)
            try:
                code = self.run.start(cfg, self.run.world, False)
            except Exception as error:  # of this job only; the sweep goes on
                if not isinstance(error, UserError):
                    traceback.print_exc()
                self.refused(job, error)
                continue
            self.end(job, code, began)
            if code in (EXIT_STOPPED, EXIT_INTERRUPTED):
                raise SystemExit(code)


def _returned(words: Sequence[str], value: float | None) -> JobReturn:
    """A job that failed is told apart by sweep.json: Hydra would end the sweep with it."""
    result = JobReturn(overrides=list(words), status=JobStatus.COMPLETED)
    result.return_value = value
    return result


def _chosen(section: DictConfig, known: dict[str, str], group: str) -> str:
    name = str(section.get("_target_", "")).rpartition(".")[2]
    if name not in known:
        raise ConfigError(f"{group}: '{name}' is not one that sweeps work with here; valid: {', '.join(known.values())}")
    return known[name]


def _check_same_kind(old: Plan, new: Plan, path: Path) -> None:
    if old.sweeper != new.sweeper:
        raise ConfigError(f"{path} holds a sweep with hydra/sweeper={old.sweeper}: give another hydra.sweep.dir")
