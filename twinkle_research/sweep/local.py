"""``hydra/launcher=joblib``: several jobs at once on this machine, each a process with its share of the CPU cores and GPUs."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from twinkle_research.config.storage import to_object
from twinkle_research.distributed.signals import StopSignals
from twinkle_research.errors import EXIT_INTERRUPTED, EXIT_STOPPED, ConfigError
from twinkle_research.sweep.folder import SweepJob
from twinkle_research.sweep.job import LOG, job_command, package_path, write_job

if TYPE_CHECKING:
    from twinkle_research.sweep.launch import SweepLauncher

_POLL_SECONDS = 0.05


@dataclass
class Running:
    job: SweepJob
    process: subprocess.Popen[bytes]
    began: float


def slots_of(n_jobs: int) -> int:
    """As joblib counts: -1 means one for each core, -2 all but one."""
    cores = len(os.sched_getaffinity(0))
    if n_jobs == 0:
        raise ConfigError("hydra.launcher.n_jobs=0: give how many jobs run at once, or -1 for one on each CPU core")
    return n_jobs if n_jobs > 0 else max(1, cores + 1 + n_jobs)


def share(items: list[Any], slot: int, slots: int) -> list[Any]:
    """The part of ``items`` that belongs to a slot: equal parts where there are enough, else one item, dealt in turn."""
    each = len(items) // slots
    return items[slot * each : (slot + 1) * each] if each else items[slot % len(items) : slot % len(items) + 1]


def run_side_by_side(launcher: SweepLauncher, jobs: list[SweepJob], n_jobs: int) -> None:
    """A signal to the sweep is passed on to all jobs, which save and leave; a second one ends them at once."""
    slots = slots_of(n_jobs)
    waiting = deque(jobs)
    running: dict[int, Running] = {}
    parent_read, parent_write = os.pipe()
    told = 0
    print(f"{len(jobs)} jobs, {min(slots, len(jobs))} at once; what each prints is in its {LOG}", flush=True)
    try:
        with StopSignals(leave_on_second=False) as stop:
            while waiting or running:
                while waiting and len(running) < slots and not stop.requested:
                    slot = min(set(range(slots)) - running.keys())
                    started = start(launcher, waiting.popleft(), slot, slots, parent_read)
                    if started is not None:
                        running[slot] = started
                for slot, one in list(running.items()):
                    if one.process.poll() is not None:
                        del running[slot]
                        launcher.end(one.job, one.process.returncode, one.began)
                        print(f"job {one.job.number} {one.job.state}: {' '.join(one.job.overrides)}", flush=True)
                if stop.count > told:
                    told = stop.count
                    waiting.clear()
                    for one in running.values():
                        one.process.send_signal(signal.SIGTERM if told == 1 else signal.SIGKILL)
                time.sleep(_POLL_SECONDS)
    finally:
        os.close(parent_write)
        os.close(parent_read)
        for one in running.values():
            one.process.kill()
            one.process.wait()
    if told:
        raise SystemExit(EXIT_STOPPED if told == 1 else EXIT_INTERRUPTED)


def start(launcher: SweepLauncher, job: SweepJob, slot: int, slots: int, parent_fd: int) -> Running | None:
    """None where the job is refused."""
    cfg = launcher.prepare(job)
    if cfg is None:
        return None
    write_job(to_object(cfg))
    cores = share(sorted(os.sched_getaffinity(0)), slot, slots)
    environ = os.environ | {"PYTHONPATH": package_path()} | gpus_of(slot, slots)
    folder = launcher.run.sweep.folder(job.number).path
    command = job_command(folder, "--parent-fd", str(parent_fd), "--cores", ",".join(map(str, cores)))
    began = launcher.begin(job)
    with (folder / LOG).open("ab") as log:
        process = subprocess.Popen(
            command, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=[parent_fd], start_new_session=True
        )
    return Running(job, process, began)


def gpus_of(slot: int, slots: int) -> dict[str, str]:
    from twinkle_research.config.plan import visible_gpus

    count = visible_gpus()
    if not count:
        return {}
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [name.strip() for name in chosen.split(",")][:count] if chosen is not None else [str(i) for i in range(count)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(share(names, slot, slots))}
