"""Which process am I: started plainly, by our own launcher, by torchrun or by srun. Nothing here imports torch."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from twinkle_research.errors import ConfigError

# Set by our launcher for the workers that it starts.
RUN_DIR_VARIABLE = "TWINKLE_RUN_DIR"

# Step ids from here up are Slurm's own (the batch script, an interactive shell), not steps that srun made.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0


@dataclass(frozen=True)
class WorldInfo:
    """Place of this process among those of one run.

    ``kind``: "plain" (no launcher: this process may start workers), "worker" (started by our launcher), "torchrun"
    or "slurm" (one of several tasks of an srun step). ``job_key`` names the run for all its ranks and restarts;
    None where the launcher gives nothing to derive it from.
    """

    kind: str
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    job_key: str | None = None

    @property
    def joins(self) -> bool:
        """Whether somebody else started the ranks of this run."""
        return self.kind in ("torchrun", "slurm")


def detect(environ: Mapping[str, str] | None = None) -> WorldInfo:
    """Reads the environment. ConfigError when it is contradictory or lacks a part."""
    env = os.environ if environ is None else environ
    if RUN_DIR_VARIABLE in env:
        return _from_rank_variables("worker", env)
    if "RANK" in env or "WORLD_SIZE" in env:
        return _from_rank_variables("torchrun", env)
    if _in_srun_step(env) and _number(env, "SLURM_STEP_NUM_TASKS") > 1:
        return _from_slurm(env)
    return WorldInfo("plain")


def _from_rank_variables(kind: str, env: Mapping[str, str]) -> WorldInfo:
    missing = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in env]
    if missing:
        present = [name for name in ("RANK", "WORLD_SIZE") if name in env]
        raise ConfigError(
            f"the environment has {' and '.join(present)} but not {', '.join(missing)}: it was left over from something "
            "else (unset it), or the launcher is not torchrun"
        )
    run_id = env.get("TORCHELASTIC_RUN_ID", "none")
    world = WorldInfo(
        kind=kind,
        rank=_number(env, "RANK"),
        local_rank=_number(env, "LOCAL_RANK"),
        world_size=_number(env, "WORLD_SIZE"),
        local_world_size=_number(env, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in env else _number(env, "WORLD_SIZE"),
        master_addr=env["MASTER_ADDR"],
        master_port=_number(env, "MASTER_PORT"),
        job_key=None if run_id == "none" else f"torchrun-{run_id}",
    )
    if not 0 <= world.rank < world.world_size:
        raise ConfigError(f"RANK={world.rank} is not below WORLD_SIZE={world.world_size}")
    return world


def _from_slurm(env: Mapping[str, str]) -> WorldInfo:
    job, step, node = (_number(env, name) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_NODEID"))
    nodes = env.get("SLURM_STEP_NODELIST") or env["SLURM_JOB_NODELIST"]
    port = _number(env, "MASTER_PORT") if "MASTER_PORT" in env else port_of_step(job, step)
    return WorldInfo(
        kind="slurm",
        rank=_number(env, "SLURM_PROCID"),
        local_rank=_number(env, "SLURM_LOCALID"),
        world_size=_number(env, "SLURM_STEP_NUM_TASKS"),
        local_world_size=tasks_per_node(env["SLURM_STEP_TASKS_PER_NODE"])[node],
        master_addr=env.get("MASTER_ADDR") or first_host(nodes),
        master_port=port,
        job_key=f"slurm-{job}.{step}",
    )


def port_of_step(job: int, step: int) -> int:
    """Below the ephemeral range, so that no outgoing connection already sits on it; different for each step of a job."""
    return 20000 + (job * 7 + step) % 10000


def _in_srun_step(env: Mapping[str, str]) -> bool:
    """A batch script has SLURM_PROCID and SLURM_NTASKS too; only what srun started has a step of its own."""
    step = env.get("SLURM_STEP_ID", "")
    return step.isdigit() and int(step) < _FIRST_SPECIAL_STEP and "SLURM_PROCID" in env and "SLURM_STEP_NUM_TASKS" in env


def _number(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env[name])
    except KeyError:
        raise ConfigError(f"the environment variable {name} is missing: is this an srun step or a torchrun worker?") from None
    except ValueError:
        raise ConfigError(f"the environment variable {name}={env[name]!r} is not a whole number") from None


def first_host(nodelist: str) -> str:
    """First name of a Slurm host list: ``gpu[003-008,012],cpu1`` -> ``gpu003``. Ranks are dealt from there."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", nodelist)
    if first is None:
        raise ConfigError(f"cannot read the host list {nodelist!r}; set MASTER_ADDR")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first.group())


def tasks_per_node(text: str) -> list[int]:
    """Slurm's run-length list: ``2(x3),1`` -> [2, 2, 2, 1]."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ConfigError(f"cannot read SLURM_STEP_TASKS_PER_NODE={text!r}")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def usable_cores() -> int:
    """CPU cores that this process may really use: the affinity mask (Slurm, taskset) and the cgroup quota (containers)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.is_file():
        limit, period = quota.read_text(encoding="ascii").split()
        if limit != "max":
            cores = min(cores, math.ceil(int(limit) / int(period)))
    return max(1, cores)


def let_idle_threads_sleep() -> None:
    """Makes OpenMP threads that wait for each other sleep instead of spin. Call it before torch is imported.

    Spinning threads use up their share of a busy CPU and then hold up those they wait for: on two shared cores, small
    operations were measured 80 times slower than with this. A setting of the user's own wins.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


def job_identity(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Slurm job and attempt that this process belongs to ({} elsewhere): a requeued job keeps its id and counts up."""
    env = os.environ if environ is None else environ
    if "SLURM_JOB_ID" not in env:
        return {}
    cluster = env.get("SLURM_CLUSTER_NAME", "")
    return {
        "job": f"{cluster}:{env['SLURM_JOB_ID']}" if cluster else env["SLURM_JOB_ID"],
        "attempt": env.get("SLURM_RESTART_COUNT", "0"),
    }
