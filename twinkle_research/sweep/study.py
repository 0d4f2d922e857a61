"""``hydra/sweeper=optuna``: a study whose trials are the jobs of the sweep.

The study lies in the folder of the sweep and goes on where it was, whatever ended it: the trial of job N has the user
attribute ``job``, so a job that was killed is run again in its folder, where it continues, and is told to its own trial. A
failed job is a failed trial: it ends nothing and counts as no result. Draws are keyed by the number of the job, so a study
that is continued does not draw again what a killed one has drawn.
"""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.errors import InstantiationException
from hydra.plugins.sweeper import Sweeper
from hydra.utils import instantiate
from omegaconf import DictConfig

from twinkle_research.config.keys import annotation_of
from twinkle_research.config.schema import GROUPS
from twinkle_research.config.storage import to_object
from twinkle_research.errors import ConfigError, UserError
from twinkle_research.randomness import derive_seed
from twinkle_research.sweep.folder import SweepJob
from twinkle_research.sweep.local import slots_of
from twinkle_research.sweep.objective import objective_of_study

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial

    from twinkle_research.sweep.launch import SweepLauncher, SweepRun

JOB, SPACE = "job", "space"
STORAGE = "study.db"
# Jobs that are chosen together where many can run at once and nothing is said.
_QUEUE_TRIALS = 4


class StudySweeper(Sweeper):
    def __init__(self, run: SweepRun, launcher: SweepLauncher, config: DictConfig) -> None:
        try:
            import optuna
        except ModuleNotFoundError as error:
            raise ConfigError("hydra/sweeper=optuna needs Optuna: pip install -e '.[sweep]'") from error
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.run = run
        self.launcher = launcher
        self.config = config
        self.settings = config.hydra.sweeper
        if self.settings.direction not in (None, "minimize", "maximize"):
            raise ConfigError(f"hydra.sweeper.direction must be minimize or maximize, got '{self.settings.direction}'")
        self.make_sampler(0)
        if config.get("dry_run"):
            raise ConfigError("dry_run=true: a study has no jobs before it runs; leave out -m and what is swept to see a plan")

    def setup(self, **_: Any) -> None:
        """Nothing: __init__ has all."""

    def sweep(self, arguments: list[str]) -> None:
        from optuna.trial import TrialState

        params = self.settings.params or {}
        space, fixed = search_space([*(f"{key}={value}" for key, value in params.items()), *arguments])
        if not space:
            raise ConfigError(
                "a study needs something to choose: optimizer.lr='tag(log, interval(1e-5, 1e-3))' or adapter.r=4,8,16"
            )
        different = size_of(grid_of(space)) if self.is_grid() or is_finite(space) else math.inf
        each_once = self.is_grid() or different <= self.settings.n_trials
        self.run.trials = min(self.settings.n_trials, different)
        if different < self.settings.n_trials:
            print(
                f"the settings to choose from make {different} different jobs: each is run once, in place of "
                f"hydra.sweeper.n_trials={self.settings.n_trials}", flush=True,
            )  # fmt: skip
        study = self.open(space, fixed)
        latest = self.known_jobs(study)
        again = [job for job, trial in sorted(latest.items()) if trial.state != TrialState.COMPLETE]
        for numbers in chunks(again, self.at_once()):
            jobs = [(number, words_of(latest[number].params, fixed)) for number in numbers]
            for number, value in self.launcher.launch_jobs(jobs).items():
                tell_again(study, latest[number], value)
        while (first := len(latest)) < self.run.trials:
            numbers = list(range(first, min(first + self.at_once(), self.run.trials)))
            if each_once:
                trials = [self.from_grid(study, space, number) for number in numbers]
            else:
                study.sampler = self.make_sampler(self.seed("sweep", first) % 2**32)
                trials = [self.ask(study, space, number) for number in numbers]
            values = self.launcher.launch_jobs([(n, words_of(t.params, fixed)) for n, t in zip(numbers, trials, strict=True)])
            for number, trial in zip(numbers, trials, strict=True):
                tell(study, trial.number, values[number])
                latest[number] = study.trials[trial.number]

    # --- parts ----------------------------------------------------------------------------------------------------------

    def open(self, space: dict[str, BaseDistribution], fixed: list[str]) -> Study:
        import optuna
        from optuna.distributions import distribution_to_json

        first = SweepJob(0, words_of({name: first_value(d) for name, d in space.items()}, fixed))
        config = to_object(self.launcher.compose(first, Path(self.config.hydra.sweep.dir)))
        objective = objective_of_study(config, self.settings.direction)
        check_storage(self.settings.storage)
        with self.run.opening(self.config, objective, [name.lstrip("+") for name in space]) as sweep:
            study = optuna.create_study(
                storage=self.settings.storage or f"sqlite:///{sweep.path / STORAGE}",
                study_name=self.settings.study_name or sweep.path.name,
                direction=objective.direction,
                load_if_exists=True,
            )
            if study.direction.name.lower() != objective.direction:
                raise ConfigError(
                    f"{sweep.path} holds a study that is to {study.direction.name.lower()}: give another hydra.sweep.dir"
                )
            described = {name: json.loads(distribution_to_json(d)) for name, d in space.items()} | {"": fixed}
            if study.user_attrs.get(SPACE, described) != described:
                raise ConfigError(f"{sweep.path} holds a study with other settings: give those, or another hydra.sweep.dir")
            if not sweep.jobs.keys() <= {trial.user_attrs.get(JOB) for trial in study.get_trials(deepcopy=False)}:
                raise ConfigError(f"{sweep.path} holds jobs that are not in the study: give another hydra.sweep.dir")
            study.set_user_attr(SPACE, described)
        return study

    def is_grid(self) -> bool:
        return str(self.settings.sampler.get("_target_")).endswith(".GridSampler")

    def make_sampler(self, seed: int) -> BaseSampler | None:
        """None for a grid, which is ours. Raises ConfigError where Optuna has none with these settings."""
        if self.is_grid():
            return None
        try:
            return instantiate(self.settings.sampler, seed=seed)
        except InstantiationException as error:
            said = (str(error.__cause__ or error).strip() or type(error).__name__).splitlines()[0]
            given = [f"{key}={v}" for key, v in self.settings.sampler.items() if key != "_target_" and v is not None]
            raise ConfigError(f"hydra.sweeper.sampler cannot have {', '.join(given)}: {said}") from error

    def ask(self, study: Study, space: dict[str, BaseDistribution], number: int) -> Any:
        try:
            trial = study.ask(space)
        except ModuleNotFoundError as error:  # CMA-ES and others, which are not of Optuna itself
            raise UserError(f"{self.settings.sampler._target_} needs {error.name}: pip install {error.name}") from error
        trial.set_user_attr(JOB, number)  # last: a trial that has it is whole
        return trial

    def seed(self, *key: object) -> int:
        own = self.settings.sampler.get("seed")
        return derive_seed(self.config.seed if own is None else own, *key)

    def from_grid(self, study: Study, space: dict[str, BaseDistribution], number: int) -> FrozenTrial:
        """The next combination, for job ``number``. Optuna's own grid only works where Optuna calls the jobs."""
        from optuna.trial import TrialState, create_trial

        points = list(itertools.product(*grid_of(space).values()))
        drawn = [trial.params for trial in study.get_trials(deepcopy=False)]
        order = sorted(range(len(points)), key=lambda place: self.seed("grid", place))
        params = next(p for place in order if (p := dict(zip(space, points[place], strict=True))) not in drawn)
        study.add_trial(create_trial(state=TrialState.RUNNING, params=params, distributions=space, user_attrs={JOB: number}))
        return study.trials[-1]

    def at_once(self) -> int:
        if self.settings.n_jobs is not None:
            return self.settings.n_jobs
        if self.launcher.kind == "basic":
            return 1
        return slots_of(self.launcher.settings["n_jobs"]) if self.launcher.kind == "joblib" else _QUEUE_TRIALS

    def known_jobs(self, study: Study) -> dict[int, FrozenTrial]:
        """The latest trial of each job. A trial of no job was being drawn when its process was killed: it has failed."""
        from optuna.trial import TrialState

        latest = {}
        for trial in study.get_trials(deepcopy=False):
            if JOB in trial.user_attrs:
                latest[trial.user_attrs[JOB]] = trial
            elif trial.state == TrialState.RUNNING:
                study.tell(trial.number, state=TrialState.FAIL)
        if sorted(latest) != list(range(len(latest))):
            raise UserError(f"{self.run.sweep.path / STORAGE}: trials are missing; it was changed by something else")
        return latest


# --- trials ------------------------------------------------------------------------------------------------------------


def tell(study: Study, trial: int, value: float | None) -> None:
    from optuna.trial import TrialState

    if value is None:
        study.tell(trial, state=TrialState.FAIL)
    else:
        study.tell(trial, value)


def tell_again(study: Study, trial: FrozenTrial, value: float | None) -> None:
    """A trial that has failed stays so; where its job has succeeded at last, a new one says it."""
    from optuna.trial import TrialState, create_trial

    if trial.state == TrialState.RUNNING:
        tell(study, trial.number, value)
    elif value is not None:
        study.add_trial(
            create_trial(params=trial.params, distributions=trial.distributions, value=value, user_attrs=trial.user_attrs)
        )


def check_storage(url: str | None) -> None:
    """Raises ConfigError where no study can be kept there."""
    from optuna.storages import get_storage

    try:
        if url is not None:
            get_storage(url)
    except Exception as error:  # of Optuna, of SQLAlchemy, of a driver
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"hydra.sweeper.storage={url}: {said}; give a URL such as sqlite:///study.db, or leave it out"
        ) from error


def chunks(items: list[int], size: int) -> list[list[int]]:
    return [items[i : i + size] for i in range(0, len(items), size)]


# --- what is chosen from -----------------------------------------------------------------------------------------------


def search_space(words: list[str]) -> tuple[dict[str, BaseDistribution], list[str]]:
    """Keys that are given several values, with their distributions; and the words that are the same for all jobs. A later word
    for the same key counts."""
    space: dict[str, BaseDistribution] = {}
    fixed: dict[str, str] = {}
    for own in OverridesParser.create().parse_overrides(words):
        key = own.get_key_element()
        space.pop(key, None)
        fixed.pop(key, None)
        if own.is_sweep_override():
            space[key] = distribution_of(own)
        else:
            fixed[key] = own.input_line
    return space, list(fixed.values())


def distribution_of(own: Override) -> BaseDistribution:
    """Values of a choice stay the words they are; a range ends before its end; an interval of a setting that is a whole number is
    one of whole numbers."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    value, key = own.value(), own.get_key_element()
    if isinstance(value, IntervalSweep):
        low, high, log = value.start, value.end, "log" in value.tags
        if low >= high or (log and low <= 0):
            raise ConfigError(
                f"'{own.input_line}': an interval goes from a smaller to a larger number, a logarithmic one above 0"
            )
        kind = annotation_of(key.lstrip("+"))
        if key.lstrip("+") in (*GROUPS, "experiment") or kind not in (None, int, float, int | None, float | None):
            raise ConfigError(f"'{own.input_line}': '{key}' is not a number; give the values it is chosen from: {key}=a,b,c")
        if kind in (int, int | None):
            if math.ceil(low) > math.floor(high):
                raise ConfigError(f"'{own.input_line}' holds no whole number, and '{key}' is one")
            return IntDistribution(math.ceil(low), math.floor(high), log=log)
        return FloatDistribution(float(low), float(high), log=log)
    values = list(dict.fromkeys(own.sweep_string_iterator()))
    if own.is_range_sweep() and len(values) > 1 and not value.shuffle and value.step > 0:
        numbers = list(own.sweep_iterator())
        if all(isinstance(number, int) for number in numbers):
            return IntDistribution(numbers[0], numbers[-1], step=int(value.step))
        return FloatDistribution(float(numbers[0]), float(numbers[-1]), step=float(value.step))
    return CategoricalDistribution(values)


def is_finite(space: dict[str, BaseDistribution]) -> bool:
    """Whether it is made of single values, of which ``grid_of`` knows all."""
    from optuna.distributions import CategoricalDistribution

    return all(isinstance(d, CategoricalDistribution) or (d.step is not None and not d.log) for d in space.values())


def grid_of(space: dict[str, BaseDistribution]) -> dict[str, list[Any]]:
    from optuna.distributions import CategoricalDistribution

    found: dict[str, list[Any]] = {}
    for key, d in space.items():
        if isinstance(d, CategoricalDistribution):
            found[key] = list(d.choices)
        elif d.step is None or d.log:
            raise ConfigError(
                f"hydra/sweeper/sampler=grid: '{key}' is an interval; give the values, {key}=choice(...) or range(...)"
            )
        else:
            found[key] = [d.low + i * d.step for i in range(round((d.high - d.low) / d.step) + 1)]
    return found


def size_of(grid: dict[str, list[Any]]) -> int:
    count = 1
    for values in grid.values():
        count *= len(values)
    return count


def first_value(distribution: BaseDistribution) -> Any:
    from optuna.distributions import CategoricalDistribution

    return distribution.choices[0] if isinstance(distribution, CategoricalDistribution) else distribution.low


def words_of(params: dict[str, Any], fixed: list[str]) -> list[str]:
    return [*fixed, *(f"{key}={value}" for key, value in params.items())]
