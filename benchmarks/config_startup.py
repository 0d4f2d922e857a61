"""CPU seconds that the command line takes before anything is trained.

    python benchmarks/config_startup.py [repeats]

Each command runs in its own process; user + system time of it and its children, the least and the median of the
repeats. A command that imports torch fails the benchmark.
"""

import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LARGE_PLAN = (
    "dry_run=true model=qwen3_235b_a22b backend=megatron launch.nodes=512 launch.gpu=h200_141gb backend.tensor_parallel=4 "
    "backend.expert_parallel=32 backend.distributed_optimizer=true adapter=none trainer.batch_size=4096 data.sample_prompts=[]"
)
# (what it is, words, exit code, goal in CPU seconds)
COMMANDS = (
    ("a config error", ["optimzer.lr=1e-4"], 2, 0.7),
    ("an error in a model's layer names", ["adapter.target_modules=[v_porj]"], 2, 0.7),
    ("dry_run=true", ["dry_run=true"], 0, 1.0),
    ("dry_run=true for 4,096 GPUs", LARGE_PLAN.split(), 0, 1.5),
    ("--cfg job", ["--cfg", "job"], 0, 1.0),
    ("--help", ["--help"], 0, 0.7),
)
WATCHED = """
import os, sys, runpy
sys.argv = ["train.py", *sys.argv[1:]]
try:
    runpy.run_path({path!r}, run_name="__main__")
finally:
    if "torch" in sys.modules:
        os._exit(99)
"""


def cpu_seconds(words: list[str], expected: int, folder: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    code = WATCHED.format(path=str(ROOT / "train.py"))
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=folder, env=environ, capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode == 99:
        raise SystemExit(f"{words}: torch was imported")
    if done.returncode != expected:
        raise SystemExit(f"{words}: exit code {done.returncode}, expected {expected}\n{done.stderr}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> int:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    print("| command | least | median | goal | |\n|---|---|---|---|---|")
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        for name, words, expected, goal in COMMANDS:
            times = [cpu_seconds(words, expected, folder) for _ in range(repeats)]
            median = statistics.median(times)
            missed += median > goal
            verdict = "ok" if median <= goal else "MISSED"
            print(f"| {name} | {min(times):.2f} s | {median:.2f} s | {goal:.1f} s | {verdict} |", flush=True)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
