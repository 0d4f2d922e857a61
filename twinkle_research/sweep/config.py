"""Settings of ``hydra/launcher=``, ``hydra/sweeper=optuna`` and ``hydra/sweeper/sampler=``.

They have the names of Hydra's plugins and mean the same; sweep/launch.py and sweep/study.py do what they say. What differs are
the defaults, and that a setting which nothing here reads is refused.
"""

import difflib
from dataclasses import dataclass, field, fields
from typing import Any, Dict, List, Optional

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

_PLUGINS = "hydra_plugins.hydra_"


@dataclass
class JoblibConfig:
    """Several jobs at once on this machine, each with its share of the CPU cores and GPUs."""

    _target_: str = f"{_PLUGINS}joblib_launcher.joblib_launcher.JoblibLauncher"
    # How many run at once. -1: one for each CPU core.
    n_jobs: int = -1


@dataclass
class SubmititConfig:
    """What both kinds of batch jobs have."""

    # Where submitit keeps its files and what the jobs print. In a folder of Slurm's jobs %j is the number of the job.
    submitit_folder: str = "${hydra.sweep.dir}/.submitit"
    # Time limit of a job, after which it is saved, queued again and goes on.
    timeout_min: int = 60
    # How often a job comes back after its time limit (with submitit_local five times at most).
    max_num_timeout: int = 100
    # Shell commands to run before each job.
    setup: Optional[List[str]] = None


@dataclass
class SubmititLocalConfig(SubmititConfig):
    """As submitit_slurm, but processes of this machine, all at once; to try things out."""

    _target_: str = f"{_PLUGINS}submitit_launcher.submitit_launcher.LocalLauncher"
    # GPUs that a job sees, the first ones; null: none.
    gpus_per_node: Optional[int] = None


@dataclass
class SubmititSlurmConfig(SubmititConfig):
    """Each job a job of Slurm, all of them an array."""

    _target_: str = f"{_PLUGINS}submitit_launcher.submitit_launcher.SlurmLauncher"
    submitit_folder: str = "${hydra.sweep.dir}/.submitit/%j"
    # Seconds before the time limit at which the jobs are told to save; Slurm may do it up to 60 s earlier.
    signal_delay_s: int = 120
    # Name of the array in the queue.
    name: str = "${hydra.job.name}"
    # Ranks of a job: nodes x tasks_per_node, joined by srun. With one task the job starts launch.nproc_per_node by itself.
    nodes: int = 1
    tasks_per_node: int = 1
    cpus_per_task: Optional[int] = None
    gpus_per_node: Optional[int] = None
    gpus_per_task: Optional[int] = None
    cpus_per_gpu: Optional[int] = None
    # Memory of a job on each node, in GB; or "64G" for each GPU or CPU.
    mem_gb: Optional[int] = None
    mem_per_gpu: Optional[str] = None
    mem_per_cpu: Optional[str] = None
    partition: Optional[str] = None
    account: Optional[str] = None
    qos: Optional[str] = None
    comment: Optional[str] = None
    constraint: Optional[str] = None
    exclude: Optional[str] = None
    gres: Optional[str] = None
    # How many jobs of the array run at once.
    array_parallelism: int = 256
    # More options of sbatch: {"mail-type": "END"}.
    additional_parameters: Dict[str, Any] = field(default_factory=dict)


@dataclass
class OptunaConfig:
    """A study: each job's settings are chosen after what earlier ones have found."""

    defaults: List[Any] = field(default_factory=lambda: [{"sampler": "tpe"}])
    _target_: str = f"{_PLUGINS}optuna_sweeper.optuna_sweeper.OptunaSweeper"
    # How settings are chosen: tpe, random, grid.
    sampler: Any = MISSING
    # Jobs of the study in all, those that fail included.
    n_trials: int = 20
    # Jobs that are chosen together, and run at once where the launcher can. null: one; as many as joblib runs; four in a queue.
    n_jobs: Optional[int] = None
    # minimize or maximize. null: what is better for the objective of the jobs.
    direction: Optional[str] = None
    # Where the study is kept. null: study.db in the folder of the sweep.
    storage: Optional[str] = None
    # Its name there. null: that of the folder.
    study_name: Optional[str] = None
    # Settings and the values they are chosen from, as on the command line.
    params: Optional[Dict[str, str]] = None


@dataclass
class TpeConfig:
    """Tree-structured Parzen estimator (Bergstra et al. 2011)."""

    _target_: str = "optuna.samplers.TPESampler"
    # null: from `seed` of the configuration.
    seed: Optional[int] = None
    # Jobs that are chosen at random before what they found is used.
    n_startup_trials: int = 10
    # Choose all settings together instead of each by itself.
    multivariate: bool = False


@dataclass
class RandomConfig:
    """Independent draws."""

    _target_: str = "optuna.samplers.RandomSampler"
    seed: Optional[int] = None


@dataclass
class GridConfig:
    """All combinations, in random order, at most n_trials of them."""

    _target_: str = "optuna.samplers.GridSampler"
    seed: Optional[int] = None


# Group -> its options that are ours; Hydra's own, basic, have no settings of a use here.
OPTIONS: Dict[str, Dict[str, type]] = {
    "hydra/launcher": {"joblib": JoblibConfig, "submitit_local": SubmititLocalConfig, "submitit_slurm": SubmititSlurmConfig},
    "hydra/sweeper": {"optuna": OptunaConfig},
    "hydra/sweeper/sampler": {"tpe": TpeConfig, "random": RandomConfig, "grid": GridConfig},
}


def register_sweeps() -> None:
    """Takes the place of what Hydra's plugins have registered under these names, where they are installed: call it after them."""
    store = ConfigStore.instance()
    for group, options in OPTIONS.items():
        for name, node in options.items():
            store.store(group=group, name=name, node=node)


def hint_of_setting(key: str, present: List[str]) -> str:
    """What to write in place of the unknown ``key`` of a sweep, whose section has the settings ``present`` now."""
    parent, _, name = key.rpartition(".")
    if name in ("metric", "objective"):
        return "the objective is no setting: it is the last eval/loss or eval/accuracy of a run, else its loss"
    groups = sorted(OPTIONS, key=lambda group: group != parent.replace(".", "/"))
    for group in groups:
        owners = [option for option, node in OPTIONS[group].items() if name in {f.name for f in fields(node)}]
        if owners:
            ways = " or ".join(f"{group}={option}" for option in owners)
            full = f"{group.replace('/', '.')}.{name}"
            return f"it is a setting of {ways}" if full == key else f"did you mean '{full}', of {ways}?"
    valid = [f"{parent}.{other}" for other in present if not other.startswith("_")]
    close = difflib.get_close_matches(name, [other.rpartition(".")[2] for other in valid], n=1)
    if close:
        return f"did you mean '{parent}.{close[0]}'?"
    return f"valid: {', '.join(valid)}" if valid else f"the chosen {parent.replace('.', '/')} has no settings"
