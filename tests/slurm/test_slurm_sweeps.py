"""Sweeps on the cluster: grids and studies whose jobs have several ranks, through submitit, and as an array."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import Cluster, processes, wait_for
from jobs import outcome, steps
from test_preemption import SFT

ROOT = Path(__file__).resolve().parents[2]
TOYS = ROOT / "tests" / "sweep" / "sweep_toys.py"
SUBMITIT = ["hydra/launcher=submitit_slurm", "hydra.launcher.tasks_per_node=2", "hydra.launcher.timeout_min=30"]


def start(cluster: Cluster, cwd: Path, *words: str, **environment: str) -> subprocess.Popen[str]:
    """train or sweep, of toys (sweep_toys.py)."""
    python_path = os.pathsep.join([str(ROOT), str(TOYS.parent)])
    return subprocess.Popen(
        [sys.executable, str(TOYS), *words], cwd=cwd, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env=cluster.environment | {"PYTHONPATH": python_path, "TOY_RANKS": "1", "TOY_PAUSE": "0.4"} | environment,
    )  # fmt: skip


def rows(folder: Path) -> list[dict]:
    file = folder / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def jobs(sweep: Path) -> dict[int, dict]:
    file = sweep / "sweep.json"
    return {job["number"]: job for job in json.loads(file.read_text())["jobs"]} if file.is_file() else {}


def status(run: Path) -> dict:
    file = run / "status.json"
    return json.loads(file.read_text()) if file.is_file() else {}


def finished(sweep: Path) -> set[int]:
    return {number for number in range(8) if status(sweep / str(number)).get("state") == "finished"}


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_sweep_through_submitit(cluster: Cluster, tmp_path: Path) -> None:
    """8 jobs of 2 ranks. Job 0 fails, job 1 is told to leave by submitit's signal, job 7 is cancelled, and the process of the
    sweep is killed half-way. Resumed it finds in the queue what is there, and then runs what has not finished."""
    words = ["model=tiny", "backend.device=cpu", "trainer.max_steps=6", "adapter.r=7,16,20,30", "optimizer.lr=1e-4,1e-2"]
    words += [*SUBMITIT, "hydra.launcher.array_parallelism=4", "hydra.sweep.dir=sweeps/grid"]
    process = start(cluster, tmp_path, "train", "-m", *words)
    sweep = tmp_path / "sweeps" / "grid"
    wait_for(lambda: len(rows(sweep / "1")) >= 2, f"job 1: {process.poll()}")
    array = jobs(sweep)[1]["cluster_id"].partition("_")[0]
    # scancel would go on trying until the job is back, and then signal it once more.
    cluster.run("timeout", "1", "scancel", "--signal=USR2", f"{array}_1")
    cluster.command("scancel", f"{array}_7")
    wait_for(lambda: len(finished(sweep)) >= 2, "two finished jobs")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert len(finished(sweep)) < 7

    process = start(cluster, tmp_path, "sweep", "resume", "sweeps/grid")
    out, _ = process.communicate(timeout=200)
    assert process.returncode == 1 and "are in the queue already" in out and "2 jobs submitted" in out, out  # 0 and 7
    assert "1 of the sweep's jobs failed" in out and "sweeps/grid/0 (the bowl is cracked at 7)" in out
    assert "Traceback" in status(sweep / "0")["traceback"] and "cracked" in (sweep / "0" / "logs" / "rank-0.log").read_text()
    assert finished(sweep) == set(range(1, 8)), out
    # Job 1 came back, and went on with the step after the one at which both ranks had left.
    assert [row["step"] for row in rows(sweep / "1")] == [1, 2, 3, 4, 5, 6] and {row["ranks"] for row in rows(sweep / "1")} == {2}
    assert cluster.field(f"{array}_1", "Restarts") == "1"
    before = {number: (sweep / str(number) / "status.json").stat().st_mtime_ns for number in range(1, 8)}

    (tmp_path / "go").touch()  # what made job 0 fail is gone
    process = start(cluster, tmp_path, "sweep", "resume", "sweeps/grid")
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0 and "1 jobs submitted" in out, out
    assert before == {number: (sweep / str(number) / "status.json").stat().st_mtime_ns for number in range(1, 8)}
    stored = jobs(sweep)
    assert sorted(stored) == list(range(8)) and {job["state"] for job in stored.values()} == {"finished"}
    assert sorted(path.name for path in sweep.iterdir() if path.name.isdigit()) == [str(number) for number in range(8)]
    assert all("group: grid" in (sweep / str(number) / "config.yaml").read_text() for number in range(8))
    best = min(stored.values(), key=lambda job: job["objective"])
    assert best["overrides"][-2:] == ["adapter.r=20", "optimizer.lr=0.01"] and f"best job    {sweep / str(best['number'])}" in out
    assert (sweep / "report.html").read_text().count("<polyline") == 8


@pytest.mark.long
@pytest.mark.timeout(200)
def test_a_job_that_dies_does_not_keep_the_sweep_waiting(cluster: Cluster, tmp_path: Path) -> None:
    """There is no sacct here to ask: without it submitit would wait for ever for a job that is gone."""
    words = ["model=tiny", "backend.device=cpu", "trainer.max_steps=1000", "seed=0", *SUBMITIT, "hydra.sweep.dir=sweeps/dead"]
    process = start(cluster, tmp_path, "train", "-m", *words, "hydra.launcher.tasks_per_node=1")
    sweep = tmp_path / "sweeps" / "dead"
    wait_for(lambda: rows(sweep / "0"), f"the job: {process.poll()}")
    cluster.command("scancel", jobs(sweep)[0]["cluster_id"])  # the run saves and leaves, and is killed after KillWait
    out, _ = process.communicate(timeout=90)
    assert process.returncode == 75 and jobs(sweep)[0]["state"] == "stopped" and "dead: stopped; 1 stopped" in out, out


@pytest.mark.long
@pytest.mark.timeout(200)
def test_an_array_is_a_sweep(cluster: Cluster, tmp_path: Path) -> None:
    words = ["model=tiny", "backend.device=cpu", "trainer.max_steps=2,3", "trainer.eval_every=null", "data.sample_prompts=[]"]
    options = ["--array=0-2", "--cpus-per-task=1", "--job-name=arr"]
    environment = {"TWINKLE_HOME": str(ROOT), "PREFLIGHT": "0", "PYTHON": sys.executable}
    array = cluster.submit(*options, str(ROOT / "slurm" / "sweep.sbatch"), *words, cwd=tmp_path, **environment)
    states = {task: cluster.wait(f"{array}_{task}") for task in range(3)}
    sweep = tmp_path / "sweeps" / f"arr-{array}"
    printed = "".join(file.read_text() for file in sorted(tmp_path.glob("arr-*.out")))
    assert states == {0: "COMPLETED", 1: "COMPLETED", 2: "FAILED"}, printed
    assert "this sweep has 2 jobs: there is no job 2; submit it with --array=0-1" in printed
    assert {n: (job["state"], job["step"]) for n, job in jobs(sweep).items()} == {0: ("finished", 2), 1: ("finished", 3)}
    assert "polyline" in (sweep / "report.html").read_text()


STUDY = ["-m", "model=tiny", "backend.device=cpu", "trainer.max_steps=3", "hydra/sweeper=optuna", "hydra.sweeper.n_trials=6",
         "hydra.sweeper.n_jobs=2", "hydra.sweeper.sampler.n_startup_trials=4", "hydra.sweep.dir=sweeps/study",
         "optimizer.lr=tag(log,interval(1e-3,1e-1))", "adapter.r=interval(16,24)"]  # fmt: skip


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_study_through_submitit(cluster: Cluster, tmp_path: Path) -> None:
    """Killed while two of its trials run as jobs of Slurm, and resumed, it has the jobs of a study that nothing has disturbed."""
    quiet = tmp_path / "undisturbed"
    quiet.mkdir()
    undisturbed = start(cluster, quiet, "train", *STUDY, TOY_RANKS="", TOY_PAUSE="0")
    process = start(cluster, tmp_path, "train", *STUDY, *SUBMITIT, TOY_PAUSE="1")
    sweep = tmp_path / "sweeps" / "study"
    wait_for(lambda: rows(sweep / "2") or process.poll() is not None, "job 2, of the second round")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    known = jobs(sweep)
    assert sorted(known) == [0, 1, 2, 3] and finished(sweep) >= {0, 1} and known[2]["cluster_id"] != known[3]["cluster_id"]

    process = start(cluster, tmp_path, "sweep", "resume", "sweeps/study")
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0 and "6 finished" in out, out
    text, _ = undisturbed.communicate(timeout=120)
    found, wanted = jobs(sweep), jobs(quiet / "sweeps" / "study")
    assert [found[n]["cluster_id"] for n in range(4)] == [known[n]["cluster_id"] for n in range(4)], out  # none was run again
    assert len(wanted) == 6, text
    assert {n: (job["overrides"], job["objective"]) for n, job in found.items()} == {
        n: (job["overrides"], job["objective"]) for n, job in wanted.items()
    }
    assert all([row["step"] for row in rows(sweep / str(n))] == [1, 2, 3] for n in found)
    best = min(found.values(), key=lambda job: job["objective"])
    assert f"best job    {sweep / str(best['number'])}" in out and best["objective"] < 0.1, out


@pytest.mark.long
@pytest.mark.timeout(300)
def test_jobs_of_two_nodes(cluster: Cluster, tmp_path: Path) -> None:
    words = ["model=tiny", "backend.device=cpu", "trainer.max_steps=2", "adapter.r=16,20", *SUBMITIT, "hydra.launcher.nodes=2"]
    process = start(cluster, tmp_path, "train", "-m", *words, "hydra.sweep.dir=sweeps/wide", TOY_PAUSE="0")
    out, _ = process.communicate(timeout=240)
    sweep = tmp_path / "sweeps" / "wide"
    assert process.returncode == 0 and finished(sweep) == {0, 1}, out
    for number in (0, 1):
        first, last = cluster.nodes
        assert [(row["step"], row["ranks"], row["nodes"]) for row in rows(sweep / str(number))] == [
            (step, 4, [first, first, last, last]) for step in (1, 2)
        ]
        assert len(list((sweep / str(number) / "logs").glob("rank-*.log"))) == 4
    assert sorted(path.name for path in sweep.iterdir() if path.is_dir()) == [".submitit", "0", "1"]


def train(cluster: Cluster, cwd: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), "-m", *words], cwd=cwd, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, env=cluster.environment,
    )  # fmt: skip


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_preempted_job_comes_back_and_the_sweep_waits_for_it(cluster: Cluster, tmp_path: Path) -> None:
    """Two jobs of the same training, each on a node of its own; one is driven away by the partition above."""
    words = [*SFT, "backend.device=cpu", "trainer.max_steps=40", "tracking.report=false,true", *SUBMITIT]
    process = train(cluster, tmp_path, *words, "hydra.launcher.cpus_per_task=2", "hydra.sweep.dir=sweeps/driven")
    sweep = tmp_path / "sweeps" / "driven"
    wait_for(lambda: len(rows(sweep / "0")) >= 10 or process.poll() is not None, "10 steps of job 0")
    victim = jobs(sweep)[0]["cluster_id"]
    node = cluster.command("squeue", "-h", "-j", victim, "-o", "%N")
    other = cluster.submit("--partition=high", f"--nodelist={node}", "--exclusive", "--wrap=sleep 1", cwd=tmp_path)
    out, _ = process.communicate(timeout=300)
    assert cluster.wait(other) == "COMPLETED"
    assert process.returncode == 0 and finished(sweep) == {0, 1} and "2 finished" in out, out
    assert [cluster.field(jobs(sweep)[number]["cluster_id"], "Restarts") for number in (0, 1)] == ["1", "0"], out
    assert "stopped at step" in (sweep / "0" / "job.log").read_text()  # it went on from there, not from an older checkpoint
    assert [steps(sweep / str(number)) for number in (0, 1)] == [list(range(1, 41))] * 2
    assert outcome(sweep / "0") == outcome(sweep / "1")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_job_at_its_time_limit_comes_back(cluster: Cluster, tmp_path: Path) -> None:
    """Its ranks stand still until the limit of 2 minutes is near, so that no machine is done by then."""
    words = [*SFT, "backend.device=cpu", "trainer.max_steps=40", "seed=0", *SUBMITIT, "hydra.sweep.dir=sweeps/late"]
    process = train(cluster, tmp_path, *words, "hydra.launcher.timeout_min=2", "hydra.launcher.signal_delay_s=30")
    sweep = tmp_path / "sweeps" / "late"
    wait_for(lambda: len(rows(sweep / "0")) >= 10 or process.poll() is not None, "10 steps")
    ranks = [
        pid for pid, environ in processes()
        if environ.get(b"SLURM_CONF") == str(cluster.folder / "slurm.conf").encode()
        and b"twinkle_research.sweep.job" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]  # fmt: skip
    assert len(ranks) == 2
    for pid in ranks:
        os.kill(pid, signal.SIGSTOP)
    (log,) = sweep.glob(".submitit/*/*_0_log.err")
    wait_for(lambda: "this job is timed-out" in log.read_text(), "the limit")
    for pid in ranks:
        os.kill(pid, signal.SIGCONT)
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 0 and finished(sweep) == {0} and "1 finished" in out, out
    restarts = int(cluster.field(jobs(sweep)[0]["cluster_id"], "Restarts"))
    assert restarts >= 1 and (sweep / "0" / "job.log").read_text().count("stopped at step") == restarts, out
    assert steps(sweep / "0") == list(range(1, 41))
