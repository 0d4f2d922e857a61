"""slurm/train.sbatch in a real Slurm, with small programs in place of train.py: what they get, and what follows their end."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import lives, processes, wait_for
from jobs import ROOT, SCRIPT

pytestmark = [pytest.mark.long, pytest.mark.timeout(240)]

# What the programs have in common: the run folder that they were given, and a checkpoint in it.
START = """
import json, os, signal, sys, time
from pathlib import Path
run_dir = Path(next(word for word in sys.argv if word.startswith("run_dir=")).partition("=")[2])
rank, attempt = int(os.environ["SLURM_PROCID"]), int(os.environ.get("SLURM_RESTART_COUNT", 0))

def write(name, text):
    path = run_dir / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)

def wait_for_signal():
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGTERM})
    print("ready", flush=True)
    signal.sigwait({signal.SIGUSR1, signal.SIGTERM})
"""


class Programs:
    """Jobs of a program in a checkout that has all that this one has, but the program as its train.py."""

    def __init__(self, cluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        for name in ("slurm", "twinkle_research"):
            (folder / name).symlink_to(ROOT / name)
        self.environment = {"PYTHON": sys.executable, "PREFLIGHT": "0"}

    def submit(self, program: str, *words: str, options: tuple[str, ...] = (), **environment: str) -> int:
        (self.folder / "train.py").write_text(START + program)
        options = ("--job-name=toy", "--cpus-per-task=1", "--time=10", *options)
        return self.cluster.submit(*options, str(SCRIPT), *words, cwd=self.folder, **self.environment | environment)

    def output(self, job: int) -> str:
        path = self.folder / f"toy-{job}.out"
        return path.read_text() if path.is_file() else ""

    def end(self, job: int) -> tuple[str, int, str]:
        """State, number of restarts and output of a job that has ended."""
        return self.cluster.wait(job), int(self.cluster.field(job, "Restarts")), self.output(job)

    def until_ready(self, job: int) -> None:
        wait_for(lambda: "ready" in self.output(job), "the program")


@pytest.fixture
def programs(cluster, tmp_path):
    return Programs(cluster, tmp_path)


def test_arguments_ranks_and_places(programs):
    program = "print(f'rank {rank} of {os.environ[\"SLURM_NTASKS\"]}: {sys.argv[1:]}', flush=True)"
    job = programs.submit(program, "model=tiny", "data.path=my rows.jsonl", options=("--nodes=2", "--ntasks-per-node=2"))
    state, restarts, output = programs.end(job)
    assert (state, restarts) == ("COMPLETED", 0)
    for rank in range(4):
        assert f"rank {rank} of 4: ['run_dir=runs/toy-{job}', 'model=tiny', 'data.path=my rows.jsonl']" in output
    assert f"run folder  {programs.folder}/runs/toy-{job}\n" in output
    assert f"output      {programs.folder}/toy-{job}.out\n" in output
    assert f"its ranks   {programs.folder}/runs/toy-{job}/logs/rank-N.log\n" in output


def test_script_that_submits_itself(programs):
    """From anywhere: options first, then settings."""
    checkout, elsewhere = programs.folder / "checkout", programs.folder / "elsewhere"
    elsewhere.mkdir()
    shutil.copytree(ROOT / "slurm", checkout / "slurm")
    (checkout / "train.py").write_text(START + "print(sys.argv[1:])")
    words = ["--job-name=own", "-N", "1", "--cpus-per-task=1", "run_dir=X", "loss=grpo"]
    told = programs.cluster.command("bash", str(checkout / "slurm/train.sbatch"), *words, cwd=elsewhere, **programs.environment)
    job = int(told.split()[1])
    assert told.startswith(f"job {job} is submitted (to end it: scancel {job})\n")
    assert f"output      {elsewhere}/own-{job}.out\n" in told and f"run folder  {elsewhere}/X\n" in told
    assert programs.cluster.wait(job) == "COMPLETED"
    assert "['run_dir=X', 'loss=grpo']" in (elsewhere / f"own-{job}.out").read_text()


@pytest.mark.parametrize("word", ["modle=tiny", "trainer.max_steps=abc", "++run_dir=x", "--array=0-1"])
def test_wrong_settings_are_not_queued(programs, word):
    cluster, before = programs.cluster, programs.cluster.try_command("squeue", "-h", "-t", "all")
    words = ["bash", str(ROOT / "slurm/train.sbatch"), "--job-name=own", word]
    told = cluster.run(*words, cwd=programs.folder, PYTHON=sys.executable)
    assert told.returncode == 2 and not told.stdout
    assert word.partition("=")[0] in told.stderr and "Traceback" not in told.stderr
    assert cluster.try_command("squeue", "-h", "-t", "all") == before


def test_gpus_are_asked_for_by_the_site(programs):
    """SBATCH_GPUS_PER_NODE, as env.sh may set it; no GPU is asked for by default."""
    program = "print('gpus', os.environ.get('SLURM_GPUS_ON_NODE'))"
    assert "gpus None\n" in programs.end(programs.submit(program))[2]
    assert "gpus 2\n" in programs.end(programs.submit(program, SBATCH_GPUS_PER_NODE="2"))[2]


def test_submitted_from_another_folder(programs):
    job = programs.cluster.submit("--job-name=toy", str(SCRIPT), cwd=programs.folder.parent)
    programs.cluster.wait(job)
    output = programs.folder.parent / f"toy-{job}.out"
    assert "is not the checkout: submit from there, or export TWINKLE_HOME" in output.read_text()


OWN_FAULT = """
if rank == 1:
    write("logs/error.json", json.dumps({"peer": False, "type": "ValueError"}, indent=1))
    sys.exit(1)
time.sleep(60)
"""


# Before there is a run: srun tells that it has ended the other rank.
REFUSED = """
if rank == 0:
    Path(os.environ["TWINKLE_REFUSAL"]).write_text("no such file")
    sys.exit(2)
time.sleep(60)
"""


@pytest.mark.parametrize("program", ["sys.exit(1)", "sys.exit(2)", OWN_FAULT, REFUSED], ids=["1", "2", "one rank", "refused"])
def test_own_fault_is_not_requeued(programs, program):
    state, restarts, output = programs.end(programs.submit(program, options=("--ntasks-per-node=2",)))
    assert (state, restarts) == ("FAILED", 0)
    assert "not requeued: the run failed by itself" in output


def test_a_killed_rank_comes_back(programs):
    """The other ranks have only seen it vanish."""
    program = """
if attempt == 1:
    sys.exit(0)
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
write("logs/error.json", json.dumps({"peer": True, "type": "RuntimeError"}, indent=1))
sys.exit(1)
"""
    state, restarts, output = programs.end(programs.submit(program, options=("--ntasks-per-node=2",)))
    assert (state, restarts) == ("COMPLETED", 1)
    assert "a rank was killed, or lost with its node" in output


def test_no_progress_is_not_requeued_for_ever(programs):
    """Saved at the same step each time: the second attempt got as far as the first, and so did the third."""
    program = "write('checkpoints/latest', 'step-000004')\nsys.exit(75)"
    state, restarts, output = programs.end(programs.submit(program, MAX_STALLED="2"))
    assert (state, restarts) == ("FAILED", 2)
    assert "2 attempts came no further than checkpoint 'step-000004': not requeued (MAX_STALLED=2)" in output


def test_progress_is_requeued_up_to_the_limit(programs):
    program = "write('checkpoints/latest', f'step-{attempt}')\nsys.exit(75)"
    state, restarts, output = programs.end(programs.submit(program, MAX_STALLED="1", MAX_REQUEUE="2"))
    assert (state, restarts) == ("FAILED", 2)
    assert "not requeued: this was attempt 2 (MAX_REQUEUE=2)" in output


SAVES = """
if attempt == 0:
    wait_for_signal()
    write("checkpoints/latest", "step-1")
    sys.exit(75)
"""


def test_warning_of_the_scheduler(programs):
    """What the time limit sends, to the batch script alone; it reaches all ranks."""
    job = programs.submit(SAVES, options=("--nodes=2",))
    programs.until_ready(job)
    wait_for(lambda: programs.output(job).count("ready") == 2, "both ranks")
    programs.cluster.command("scancel", "--batch", "--signal=USR1", str(job))
    state, restarts, output = programs.end(job)
    assert (state, restarts) == ("COMPLETED", 1)
    assert "the ranks are asked to save and leave" in output and "[job] requeued" in output


def test_cancelled_is_not_requeued(programs):
    job = programs.submit(SAVES, "run_dir=X")
    programs.until_ready(job)
    programs.cluster.command("scancel", str(job))
    assert programs.cluster.wait(job) == "CANCELLED"
    wait_for(lambda: "the ranks ended with" in programs.output(job), "the end of the script")
    assert programs.cluster.field(job, "Restarts") == "0"
    assert "to continue" in programs.output(job)


@pytest.mark.parametrize("which", [0, 1])
def test_a_node_is_lost(programs, which):
    """Also the one that this script runs on."""
    cluster = programs.cluster
    job = programs.submit("if attempt == 0:\n    print('ready', flush=True)\n    time.sleep(100)", options=("--nodes=2",))
    wait_for(lambda: programs.output(job).count("ready") == 2, "both ranks")
    cluster.lose_node(cluster.nodes[which])
    wait_for(lambda: cluster.field(job, "Restarts") == "1", "the restart")
    cluster.return_node(cluster.nodes[which])
    state, restarts, _ = programs.end(job)
    assert (state, restarts) == ("COMPLETED", 1)
    attempts = (programs.folder / "runs" / f"toy-{job}" / "slurm-attempts.tsv").read_text().splitlines()
    assert [line.split("\t")[:3] for line in attempts] == [[str(job), "0", "none"], [str(job), "1", "none"]]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("TWINKLE_LAUNCHER", "mpirun", "=mpirun is not one; valid: srun, torchrun"),
        ("MAX_STALLED", "0", "=0 must be a whole number of at least 1"),
        ("PREFLIGHT_FREE_GB", "abc", "=abc must be a number of at least 0"),
    ],
)
def test_wrong_settings_of_the_site(programs, name, value, words):
    state, restarts, output = programs.end(programs.submit("", **{name: value}))
    assert (state, restarts) == ("FAILED", 0)
    assert name + words in output


def test_nothing_outlives_a_killed_test_session(tmp_path_factory):
    """Neither the daemons nor a job, which ignores what can be ignored."""
    conf = tmp_path_factory.mktemp("other") / "cluster" / "slurm.conf"
    code = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from cluster import Cluster
cluster = Cluster(Path({str(conf.parent)!r}), nodes=1)
cluster.start()
cluster.submit("--wrap=trap : TERM USR1; srun bash -c 'trap : TERM; touch running; sleep 99' & wait; wait", cwd=cluster.folder)
print("started", flush=True)
time.sleep(150)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "started\n"
    wait_for((conf.parent / "running").exists, "the job")

    def of_the_cluster() -> list[int]:
        return [pid for pid, environ in processes() if environ.get(b"SLURM_CONF") == str(conf).encode() and lives(pid)]

    assert len(of_the_cluster()) >= 3 + 4  # munged, slurmctld, slurmd; two steps, srun and what runs in them
    process.kill()
    process.wait()
    process.stdout.close()
    wait_for(lambda: not of_the_cluster(), "the end of all processes of the cluster")
