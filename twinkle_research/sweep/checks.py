"""What is refused before a sweep writes or starts anything: settings of Hydra's that nothing here reads, numbers without sense,
and folders that belong to something else."""

from __future__ import annotations

from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Sweep
from omegaconf import DictConfig, OmegaConf

from twinkle_research.errors import ConfigError, nearest
from twinkle_research.sweep.again import check_folder

# What has a meaning in a sweep; Hydra's other settings would be read by nobody.
HYDRA_KEYS = (
    "hydra.sweep.dir", "hydra.launcher", "hydra.sweeper", "hydra.job.name", "hydra.mode", "hydra.searchpath", "hydra.verbose",
)  # fmt: skip
# Slurm looks at time limits every 30 s, and says: "the signal may be sent up to 60 seconds earlier than specified".
SIGNAL_EARLY_SECONDS = 60
# The least that a number may be; where it is null its default counts. (n_jobs of joblib may be negative: sweep/local.py.)
_LEAST = {
    "hydra.launcher.timeout_min": 1,
    "hydra.launcher.max_num_timeout": 0,
    "hydra.launcher.signal_delay_s": 1,
    "hydra.launcher.nodes": 1,
    "hydra.launcher.tasks_per_node": 1,
    "hydra.launcher.cpus_per_task": 1,
    "hydra.launcher.gpus_per_node": 0,
    "hydra.launcher.gpus_per_task": 0,
    "hydra.launcher.cpus_per_gpu": 1,
    "hydra.launcher.mem_gb": 0,  # for Slurm: all of a node
    "hydra.launcher.array_parallelism": 1,
    "hydra.sweeper.n_trials": 1,
    "hydra.sweeper.n_jobs": 1,
    "hydra.sweeper.sampler.n_startup_trials": 0,
}


def check_settings(config: DictConfig) -> None:
    """Raises ConfigError; leaves nothing behind."""
    for word in config.hydra.overrides.hydra:
        key = word.lstrip("+~").partition("=")[0].replace("/", ".")
        if not any(key == known or key.startswith(f"{known}.") for known in HYDRA_KEYS):
            more = " (the folder of job N is <hydra.sweep.dir>/N)" if key == "hydra.sweep.subdir" else ""
            raise ConfigError(f"'{key}' has no effect in a sweep{more}; {nearest(key, HYDRA_KEYS)}")
    for group in ("launcher", "sweeper"):
        chosen = config.hydra[group]
        if not isinstance(chosen, DictConfig):
            raise ConfigError(f"'hydra.{group}={chosen}': it is a group of options, chosen with a slash: hydra/{group}={chosen}")
    if config.hydra.sweeper.get("max_batch_size") is not None:
        raise ConfigError(
            "'hydra.sweeper.max_batch_size' has no effect here: the launcher says how many jobs run at once, "
            "hydra/launcher=joblib hydra.launcher.n_jobs=4 for example"
        )
    check_numbers(config)
    check_ranges(swept(config))
    check_folder(Path(config.hydra.sweep.dir))


def check_numbers(config: DictConfig) -> None:
    for key, least in _LEAST.items():
        value = OmegaConf.select(config, key)
        if value is not None and value < least:
            raise ConfigError(f"{key} must be at least {least}, got {value}")
    limit, delay = (OmegaConf.select(config, f"hydra.launcher.{name}") for name in ("timeout_min", "signal_delay_s"))
    if delay is not None and delay + SIGNAL_EARLY_SECONDS >= limit * 60:
        raise ConfigError(
            f"hydra.launcher.signal_delay_s={delay}: jobs are told to save that many seconds before their time limit, and up to "
            f"{SIGNAL_EARLY_SECONDS} earlier; hydra.launcher.timeout_min={limit} ({limit * 60} s) leaves none to train: give "
            "more minutes, or fewer seconds"
        )


def check_ranges(words: list[Override]) -> None:
    for own in words:
        if own.is_choice_sweep() and any(isinstance(value, Sweep) for value in own.value().list):
            raise ConfigError(f"'{own.input_line}': range() and interval() stand alone, not among other values")
        if own.is_range_sweep():
            if own.value().step == 0:
                raise ConfigError(f"'{own.input_line}': the step of a range cannot be 0")
            if next(own.sweep_iterator(), None) is None:
                raise ConfigError(f"'{own.input_line}' holds no value: range(start,stop,step) ends before stop")


def swept(config: DictConfig) -> list[Override]:
    """What the words, or ``hydra.sweeper.params``, give several values."""
    params = config.hydra.sweeper.get("params") or {}
    words = [*(f"{key}={value}" for key, value in params.items()), *config.hydra.overrides.task]
    return [own for own in OverridesParser.create().parse_overrides(words) if own.is_sweep_override()]


def refuse_intervals(config: DictConfig) -> None:
    for own in swept(config):
        if own.is_interval_sweep():
            key = own.get_key_element()
            raise ConfigError(f"'{key}' is an interval; hydra/sweeper=optuna chooses from it, or give its values: {key}=a,b,c")
