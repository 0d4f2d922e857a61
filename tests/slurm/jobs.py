"""Jobs of ``slurm/train.sbatch`` in the test cluster: what they come to, and the ways in which they are disturbed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster import Cluster, lives, processes, wait_for

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "slurm" / "train.sbatch"
WARNING = "time limit or preemption is near"
TWO_BY_TWO = ["--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=1", "--time=10"]


class Job:
    """One run of training on 2 nodes x 2 ranks, in ``folder/run``."""

    def __init__(self, cluster: Cluster, folder: Path, words: list[str], options: list[str], **environment: str) -> None:
        self.cluster = cluster
        self.folder = folder
        self.run_dir = folder / "run"
        self.words = [f"run_dir={self.run_dir}", *words]
        self.options = options
        home = {
            "TWINKLE_HOME": str(ROOT),
            "PYTHON": sys.executable,
            "PREFLIGHT": "0",
            "TMPDIR": str(folder),
            "WANDB_MODE": "offline",
        }
        self.environment = home | environment
        folder.mkdir(parents=True, exist_ok=True)
        self.submit()

    def submit(self) -> None:
        options = [*TWO_BY_TWO, "--job-name=run", *self.options]
        self.id = self.cluster.submit(*options, str(SCRIPT), *self.words, cwd=self.folder, **self.environment)

    @property
    def output(self) -> str:
        return (self.folder / f"run-{self.id}.out").read_text()

    @property
    def restarts(self) -> int:
        return int(self.cluster.field(self.id, "Restarts"))

    def step(self) -> int:
        """The last one in metrics.jsonl."""
        found = steps(self.run_dir)
        return found[-1] if found else 0

    def checkpoint(self) -> int:
        latest = self.run_dir / "checkpoints" / "latest"
        return int(latest.read_text().partition("-")[2]) if latest.is_file() else 0

    def wait_for_step(self, step: int, seconds: float = 200.0) -> None:
        wait_for(lambda: self.step() >= step or self.ended(), f"step {step} (now {self.step()})", seconds)
        assert self.step() >= step, self.output

    def ended(self) -> bool:
        return self.cluster.state(self.id) not in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING")

    def finish(self, seconds: float = 300.0) -> None:
        state = self.cluster.wait(self.id, seconds=seconds)
        assert state == "COMPLETED", self.output

    def comes_back(self) -> None:
        restarts = self.restarts_before + 1
        wait_for(lambda: self.ended() or self.restarts == restarts, f"restart {restarts}")
        assert self.restarts == restarts, self.output

    # --- disturbances -------------------------------------------------------------------------------------------

    def disturb(self, kind: str) -> None:
        """Ends this attempt in the middle of things."""
        self.restarts_before = self.restarts
        ranks = list(self.processes())
        getattr(self, kind)()
        wait_for(lambda: not any(lives(pid) for pid in ranks), "the end of the attempt's ranks")

    def preempt(self) -> None:
        with self.paused_until_warned():
            other = self.cluster.submit("--partition=high", "--nodes=2", "--exclusive", "--wrap=sleep 1", cwd=self.folder)
        self.comes_back()
        self.cluster.wait(other)

    def time_limit(self) -> None:
        """The end comes into sight: less than the 180 s of ``--signal`` are left."""
        with self.paused_until_warned():
            self.cluster.command("scontrol", "update", f"JobId={self.id}", "TimeLimit=2")
        self.comes_back()
        self.cluster.command("scontrol", "update", f"JobId={self.id}", "TimeLimit=10")

    @contextmanager
    def paused_until_warned(self) -> Iterator[None]:
        """Slurm looks at time limits every 30 s; so short a run would be over by then. Signals wait for the paused ranks."""
        ranks = list(self.processes())
        for pid in ranks:
            os.kill(pid, signal.SIGSTOP)
        told = self.output.count(WARNING)
        yield
        wait_for(lambda: self.output.count(WARNING) > told, "the warning")
        for pid in ranks:
            os.kill(pid, signal.SIGCONT)

    def requeue(self) -> None:
        self.cluster.command("scontrol", "requeue", str(self.id))
        self.comes_back()

    def node_down(self) -> None:
        """The last node, which still hears that its ranks are to end."""
        node = self.cluster.nodes[-1]
        self.cluster.command("scontrol", "update", f"nodename={node}", "state=DOWN", "reason=test")
        self.comes_back()
        self.cluster.return_node(node)

    def node_lost(self) -> None:
        """The first node, with this script and rank 0."""
        self.cluster.lose_node(self.cluster.nodes[0])
        self.comes_back()
        self.cluster.return_node(self.cluster.nodes[0])

    def kill_a_rank(self) -> None:
        (pid,) = self.processes(rank=1)
        os.kill(pid, signal.SIGKILL)
        self.comes_back()

    def cancel(self) -> None:
        """It stays away; the same words continue its folder, under the other launcher."""
        self.cluster.command("scancel", str(self.id))
        assert self.cluster.wait(self.id) == "CANCELLED"
        wait_for(lambda: not list(self.processes()), "the end of its ranks")
        self.environment["TWINKLE_LAUNCHER"] = "torchrun"
        self.submit()

    def processes(self, rank: int | None = None) -> Iterator[int]:
        """The ranks of this job that live."""
        for pid, environ in processes():
            if environ.get(b"SLURM_JOB_ID") != str(self.id).encode():
                continue
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                # Not srun, not an agent of torchrun: the interpreter with train.py.
                is_rank = str(ROOT / "train.py").encode() in (words[1:2] if words[1:2] != [b"-u"] else words[2:3])
                number = environ.get(b"RANK", environ.get(b"SLURM_PROCID"))
                if is_rank and (rank is None or int(number) == rank):
                    yield pid


KINDS = ["preempt", "time_limit", "requeue", "node_down", "node_lost", "kill_a_rank", "cancel"]


def steps(run_dir: Path) -> list[int]:
    path = run_dir / "metrics.jsonl"
    text = path.read_text() if path.is_file() else ""
    return [json.loads(line)["step"] for line in text.split("\n")[:-1]]


def outcome(run_dir: Path) -> dict[str, str]:
    """What must not depend on disturbances: hashes of weights, optimizer, samples and metrics, and the trainer's state."""
    newest = run_dir / "checkpoints" / (run_dir / "checkpoints" / "latest").read_text().strip()
    files = [path for path in sorted(newest.rglob("*")) if path.suffix == ".safetensors"]
    files += [path for path in (run_dir / "metrics.jsonl", run_dir / "samples.jsonl") if path.is_file()]
    state = json.loads((newest / "trainer_state.json").read_text())
    del state["wandb_run_id"]  # each run has its own
    hashes = {str(path.relative_to(run_dir)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    return hashes | {"trainer_state": json.dumps(state, sort_keys=True)}


def recorded_by_wandb(run_dir: Path) -> tuple[set[str], list[int], list[bool]]:
    """From the offline files of all attempts, in their order: ids, steps of training rows, and which were left preempting."""
    from twinkle_research.tracking.wandb_log import read_records, values_of

    ids: set[str] = set()
    found: list[int] = []
    preempting = []
    for path in sorted((run_dir / "wandb").glob("offline-run-*/run-*.wandb")):
        marked = False
        for record in read_records(path):
            kind = record.WhichOneof("record_type")
            marked |= kind == "preempting"
            if kind == "run":
                ids.add(record.run.run_id)
            if kind == "history" and "loss" in (row := values_of(record.history)):
                found.append(row["step"])
        preempting.append(marked)
    return ids, found, preempting
