"""``hydra/launcher=submitit_slurm`` and ``submitit_local``: each job of the sweep a batch job, whose tasks are its ranks.

submitit submits them and brings back those that were preempted or came to their time limit. Whether a job has ended is read
from its result file and from ``squeue``, never from ``sacct``, without which submitit would wait for ever for a job that died;
how it ended is read from its run folder, since for Slurm a run that failed inside Python may look like any other.
"""

from __future__ import annotations

import shlex
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinkle_research.config.schema import config_dir
from twinkle_research.config.storage import to_object
from twinkle_research.distributed.signals import StopSignals
from twinkle_research.errors import EXIT_STOPPED, ConfigError, UserError
from twinkle_research.sweep.folder import SweepJob
from twinkle_research.sweep.job import job_command, package_path, write_job
from twinkle_research.sweep.rank import RankOfJob

if TYPE_CHECKING:
    from twinkle_research.sweep.launch import SweepLauncher

POLL_SECONDS = 1.0
QUEUE_SECONDS = 5.0
# So long a job must be out of the queue, without a result, before it counts as gone: one that is requeued is back sooner.
GONE_SECONDS = 12.0
_ENDED = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT",
}  # fmt: skip
# Of our settings, what submitit is told elsewhere.
_OWN = ("_target_", "submitit_folder", "max_num_timeout", "setup")
# Settings that all kinds of batch jobs have; the others begin with the kind.
_SHARED = ("name", "nodes", "timeout_min", "mem_gb", "tasks_per_node", "cpus_per_task", "gpus_per_node")


def check_settings(kind: str, settings: dict[str, Any]) -> None:
    """Raises ConfigError where the batch jobs cannot be submitted from here."""
    try:
        from submitit.slurm.slurm import SlurmExecutor
    except ModuleNotFoundError as error:
        raise ConfigError(f"hydra/launcher={kind} needs submitit: pip install -e '.[slurm]'") from error
    if kind == "submitit_slurm" and SlurmExecutor.affinity() < 0:
        raise ConfigError("hydra/launcher=submitit_slurm: there is no srun here; submit from a machine of the cluster")
    if kind == "submitit_local" and "%" in settings["submitit_folder"]:
        raise ConfigError(
            f"hydra.launcher.submitit_folder={settings['submitit_folder']}: names such as %j are for Slurm; here the names of "
            "the files in it have the number of the job"
        )


@dataclass
class Watched:
    job: SweepJob
    result: Path
    gone_since: float | None = None


def run_as_batch_jobs(launcher: SweepLauncher, jobs: list[SweepJob]) -> None:
    """Submits the jobs that are not in the queue already, and waits for all. Ctrl-C leaves them there."""
    states = queue_states(launcher.kind, jobs)
    waiting_there = [job for job in jobs if job.cluster_id and is_active(states.get(job.cluster_id))]
    new = [job for job in jobs if job not in waiting_there]
    prepared = []
    for job in new:
        cfg = launcher.prepare(job)
        if cfg is not None:
            write_job(to_object(cfg))
            prepared.append(job)
    folder = Path(launcher.settings["submitit_folder"]).absolute()
    if prepared:
        submit(launcher, folder, prepared)
    if waiting_there:
        print(f"{len(waiting_there)} jobs are in the queue already: {', '.join(job.cluster_id for job in waiting_there)}")
    watch(launcher, folder, [*waiting_there, *prepared])


def submit(launcher: SweepLauncher, folder: Path, jobs: list[SweepJob]) -> None:
    from submitit.core.utils import FailedJobError

    executor = make_executor(launcher, folder)
    sweep = launcher.run.sweep
    calls = [RankOfJob(job_command(sweep.folder(job.number).path), str(sweep.folder(job.number).path)) for job in jobs]
    try:
        with executor.batch():
            handles = [executor.submit(call) for call in calls]
    except FailedJobError as error:
        raise UserError(f"the jobs could not be submitted; the sweep can be resumed\n{str(error).strip()}") from error
    for job, handle in zip(jobs, handles, strict=True):
        job.cluster_id, job.state, job.error, job.objective, job.seconds = handle.job_id, "waiting", None, None, None
    sweep.save()
    print(f"{len(jobs)} jobs submitted: {', '.join(job.cluster_id for job in jobs)}", flush=True)


def make_executor(launcher: SweepLauncher, folder: Path) -> Any:
    from submitit import AutoExecutor

    cluster = launcher.kind.removeprefix("submitit_")
    settings = {
        name if name in _SHARED else f"{cluster}_{name}": value
        for name, value in launcher.settings.items()
        if name not in _OWN and value is not None
    }
    settings[f"{cluster}_setup"] = [*_setup(launcher.kind), *(launcher.settings["setup"] or [])]
    executor = AutoExecutor(folder, cluster=cluster, **{f"{cluster}_max_num_timeout": launcher.settings["max_num_timeout"]})
    executor.update_parameters(**settings)
    return executor


def _setup(kind: str) -> list[str]:
    """What a site has put into slurm/env.sh holds for these jobs too; and they must find this package."""
    lines = []
    home = config_dir().parent
    if kind == "submitit_slurm" and (home / "slurm" / "env.sh").is_file():
        lines = [f"export TWINKLE_HOME={shlex.quote(str(home))}", 'source "$TWINKLE_HOME/slurm/env.sh"']
    return [*lines, f"export PYTHONPATH={shlex.quote(package_path())}"]


# --- waiting -----------------------------------------------------------------------------------------------------------


def watch(launcher: SweepLauncher, folder: Path, jobs: list[SweepJob]) -> None:
    from submitit.core.utils import JobPaths

    watched = [Watched(job, JobPaths(folder, job_id=job.cluster_id, task_id=0).result_pickle) for job in jobs]
    states: dict[str, str] | None = {}
    began: dict[int, float] = {}
    asked = 0.0
    with StopSignals() as stop:
        while watched:
            if stop.requested:
                print("the jobs stay in the queue: the sweep resumed finds them there, or end them with scancel", flush=True)
                raise SystemExit(EXIT_STOPPED)
            if time.monotonic() - asked > QUEUE_SECONDS:
                states, asked = queue_states(launcher.kind, jobs), time.monotonic()
            for one in list(watched):
                if one.result.exists():
                    finish(launcher, one, "", began.get(one.job.number))
                    watched.remove(one)
                elif states is not None and is_gone(one, states.get(one.job.cluster_id)):
                    finish(launcher, one, states.get(one.job.cluster_id) or "no longer in the queue", began.get(one.job.number))
                    watched.remove(one)
                else:
                    look(launcher, one.job, began)
            time.sleep(POLL_SECONDS)


def look(launcher: SweepLauncher, job: SweepJob, began: dict[int, float]) -> None:
    before = job.state, job.step
    launcher.run.sweep.look_at(job)
    if job.state == "running":
        began.setdefault(job.number, time.monotonic())
    if (job.state, job.step) != before:
        launcher.run.update(job)


def is_gone(one: Watched, state: str | None) -> bool:
    if is_active(state):
        one.gone_since = None
        return False
    one.gone_since = one.gone_since or time.monotonic()
    return time.monotonic() - one.gone_since > GONE_SECONDS


def finish(launcher: SweepLauncher, one: Watched, fate: str, began: float | None) -> None:
    """``fate``: how the queue says that a job ended which left no result."""
    job, sweep = one.job, launcher.run.sweep
    sweep.look_at(job)
    if job.state not in ("finished", "failed", "stopped"):
        job.state = "killed"
        why = f" ({fate})" if fate else ""
        job.error = f"batch job {job.cluster_id} ended without an account of why{why}; what it printed: {one.result.parent}"
    if began is not None:
        job.seconds = round(time.monotonic() - began, 3)
    print(f"job {job.number} {job.state}: {' '.join(job.overrides)}", flush=True)
    launcher.run.update(job)


# --- the queue ---------------------------------------------------------------------------------------------------------


def is_active(state: str | None) -> bool:
    return state is not None and state not in _ENDED


def queue_states(kind: str, jobs: list[SweepJob]) -> dict[str, str] | None:
    """State of each of our jobs that the queue knows; None where it does not answer now."""
    if kind == "submitit_local":
        return {job.cluster_id: "RUNNING" for job in jobs if job.cluster_id and _is_submitit(job.cluster_id)}
    done = subprocess.run(["squeue", "--me", "-h", "-r", "-t", "all", "-o", "%i|%T"], capture_output=True, text=True)
    if done.returncode:
        return None
    return dict(line.strip().split("|", 1) for line in done.stdout.splitlines() if "|" in line)


def _is_submitit(pid: str) -> bool:
    try:
        return b"submitit" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
