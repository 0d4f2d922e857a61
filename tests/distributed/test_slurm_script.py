"""slurm/train.sbatch with stand-ins for srun and scontrol: what it starts, and when it requeues itself.

tests/slurm has the real ones."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "slurm" / "train.sbatch"


@pytest.fixture
def job(tmp_path):
    """Starts the script in ``tmp_path``; ``srun`` is bash code of what the ranks do."""
    (tmp_path / "bin").mkdir()

    def command(name: str, code: str) -> None:
        file = tmp_path / "bin" / name
        file.write_text(f"#!/bin/bash\n{code}\n")
        file.chmod(0o755)

    command("scontrol", 'echo "scontrol $*"')
    command("sleep", "exec /bin/sleep 0.2")

    def start(srun: str, *arguments: str, **environ: str) -> subprocess.Popen[str]:
        command("srun", f'echo "srun $*"\n{srun}')
        names = {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "twinkle", "SLURM_JOB_NODELIST": "n1", "SLURM_SUBMIT_DIR": str(tmp_path)}
        names |= {
            "TWINKLE_HOME": str(SCRIPT.parents[1]),
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
            "PYTHON": "python9",
            "PREFLIGHT": "0",
        }
        return subprocess.Popen(
            ["bash", str(SCRIPT), *arguments], cwd=tmp_path, env=os.environ | names | environ, stdout=subprocess.PIPE, text=True
        )

    return start


WAIT_FOR_USR1 = "trap 'exit 75' USR1 TERM; echo ready; while true; do sleep 1; done"


def until_ready(process: subprocess.Popen[str]) -> str:
    text = ""
    while "ready" not in text:
        text += process.stdout.readline()
    time.sleep(0.2)
    return text


def test_run_to_the_end(job):
    process = job("exit 0", "model=tiny", "data.path=my rows.jsonl")
    out, _ = process.communicate(timeout=20)
    assert process.returncode == 0
    assert f"python9 {SCRIPT.parents[1]}/train.py run_dir=runs/twinkle-7 model=tiny data.path=my rows.jsonl" in out
    assert "--kill-on-bad-exit=1" in out and "scontrol" not in out


def test_own_run_dir_and_failure(job):
    process = job("exit 1", "run_dir=X")
    out, _ = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "train.py run_dir=X\n" in out and "scontrol" not in out


def test_warning_saves_and_requeues(job):
    process = job(WAIT_FOR_USR1, "run_dir=X")
    until_ready(process)
    process.send_signal(signal.SIGUSR1)
    out, _ = process.communicate(timeout=20)
    assert "scontrol requeue 7" in out
    assert process.returncode == 75


@pytest.mark.parametrize("why", ["cancelled", "too often"])
def test_no_requeue(job, why):
    process = job(WAIT_FOR_USR1, "run_dir=X", SLURM_RESTART_COUNT="3", MAX_REQUEUE="3" if why == "too often" else "9")
    out = until_ready(process)
    if why == "cancelled":
        process.send_signal(signal.SIGTERM)  # Slurm sends it to the batch shell and to the ranks
        time.sleep(0.2)
    process.send_signal(signal.SIGUSR1)
    out += process.communicate(timeout=20)[0]
    assert process.returncode == 75
    assert "scontrol" not in out


ERROR = 'mkdir -p X/logs; sleep 0.02; echo \'{"peer": %s, "type": "ValueError"}\' >X/logs/error.json; exit 143'


@pytest.mark.parametrize(
    "srun, comes_back",
    [("exit 137", True), (ERROR % "true", True), (ERROR % "false", False), ("exit 2", False), ("exit 130", False)],
    ids=["killed", "lost its peer", "an error", "config", "second signal"],
)
def test_who_is_to_blame(job, srun, comes_back):
    process = job(srun, "run_dir=X")
    out, _ = process.communicate(timeout=20)
    assert ("scontrol requeue 7" in out) == comes_back, out


def test_error_of_an_earlier_attempt_says_nothing(job, tmp_path):
    (tmp_path / "X" / "logs").mkdir(parents=True)
    (tmp_path / "X" / "logs" / "error.json").write_text('{"peer": false, "type": "ValueError"}')
    os.utime(tmp_path / "X" / "logs" / "error.json", (1e9, 1e9))
    assert "scontrol requeue 7" in job("exit 137", "run_dir=X").communicate(timeout=20)[0]


def test_no_progress(job, tmp_path):
    """Two attempts began with the newest checkpoint; a third may not change that, nor is a fourth started."""
    (tmp_path / "X" / "checkpoints").mkdir(parents=True)
    (tmp_path / "X" / "checkpoints" / "latest").write_text("step-000004\n")
    attempts = tmp_path / "X" / "slurm-attempts.tsv"
    attempts.write_text("7\t0\tstep-000002\tn1\tthen\n" + "7\t1\tstep-000004\tn1\tthen\n" + "7\t2\tstep-000004\tn1\tthen\n")
    out, _ = job("exit 75", "run_dir=X").communicate(timeout=20)
    assert "3 attempts came no further than checkpoint 'step-000004': not requeued (MAX_STALLED=3)" in out
    process = job("exit 0", "run_dir=X")
    out, _ = process.communicate(timeout=20)
    assert process.returncode == 1 and "srun" not in out
    assert "srun" in job("exit 0", "run_dir=X", SLURM_JOB_ID="8").communicate(timeout=20)[0]
