"""Runs of the real command for tests: in this process, or in a forked child that may be killed at any moment.

A fork starts with everything imported that a run needs, so that a killed and resumed run costs a fraction of a second.
"""

import functools
import hashlib
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import peft  # noqa: F401
import transformers.models.qwen3.modeling_qwen3  # noqa: F401
from children import fork, wait
from omegaconf import DictConfig

import twinkle_research.trainer.run  # noqa: F401
from twinkle_research.config import compose, to_object
from twinkle_research.config.plan import run_plan
from twinkle_research.distributed.launcher import start
from twinkle_research.trainer.loop import TrainingLoop

QUIET = ["tracking.progress=none", "tracking.tensorboard=false", "tracking.report=false", "data.sample_prompts=[]"]
# 23 rows by 4: six steps an epoch, the last of them with three rows.
TINY = ["model=tiny", "data.limit=23", "trainer.batch_size=4", "trainer.eval_every=null", *QUIET]


# A rollout of 4 prompts by 4 completions, cut into two batches and gone through twice: four optimizer steps. The reward has
# something to say even of the answers of a random model.
RL = ["loss=grpo", "model=tiny", "sampler=transformers", "sampler.max_tokens=6", "trainer.batch_size=2",
      "rollout.prompts_per_step=4", "rollout.num_generations=4", "trainer.inner_epochs=2", "data.eval_rows=4",
      "trainer.eval_samples=2", "reward=function", f"reward.path={Path(__file__).with_name('short_words.py')}:short_words",
      "optimizer.eps=1e-5",
      *(word for word in QUIET if not word.startswith("data."))]  # fmt: skip


@functools.cache
def composed(overrides: tuple[str, ...]) -> DictConfig:
    if "model=tiny" in overrides:  # RL, or some of it, which needs none of the other words
        return compose(list(overrides))
    words = [word for word in TINY if "data=mix" not in overrides or not word.startswith("data.limit")]
    return compose([*words, *overrides])


def train(run_dir: Path, *overrides: str) -> int:
    """``python train.py`` in this process; returns its exit code."""
    cfg = to_object(composed(overrides))
    return start(cfg, run_plan(cfg), run_dir)


def train_in_fork(run_dir: Path, *overrides: str, before: Callable[[], None] | None = None) -> int:
    """Starts ``train`` in a child, after ``before`` in that child, and returns its pid."""
    composed(overrides)  # here, so that children need not

    def action() -> None:
        if before is not None:
            before()
        sys.exit(train(run_dir, *overrides))

    return fork(action)


def train_in_child(run_dir: Path, *overrides: str, before: Callable[[], None] | None = None) -> int:
    """The exit code of ``train`` in a child; the negative signal number if one killed it."""
    return wait(train_in_fork(run_dir, *overrides, before=before))


def killed_after(step: int) -> None:
    """In a child: SIGKILL after ``step`` optimizer steps, the next one having been computed but not recorded."""
    inner = TrainingLoop.optimize

    def optimize(self, features, **loss_inputs):
        row = inner(self, features, **loss_inputs)
        if self.step == step + 1:
            die()
        return row

    TrainingLoop.optimize = optimize


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fingerprint(run_dir: Path) -> dict[str, str]:
    """SHA-256 of everything that an exact resume must reproduce: weights, optimizer, progress and metrics."""
    newest = run_dir / "checkpoints" / (run_dir / "checkpoints" / "latest").read_text().strip()
    files = [p for p in sorted(newest.rglob("*")) if p.suffix == ".safetensors"]
    hashes = {str(p.relative_to(newest)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}
    state = json.loads((newest / "trainer_state.json").read_text())
    hashes["trainer_state"] = json.dumps(state, sort_keys=True)
    hashes["metrics"] = hashlib.sha256((run_dir / "metrics.jsonl").read_bytes()).hexdigest()
    hashes["samples"] = hashlib.sha256(read_or_empty(run_dir / "samples.jsonl")).hexdigest()
    return hashes


def read_or_empty(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


def rows(run_dir: Path, name: str = "metrics.jsonl") -> list[dict]:
    return [json.loads(line) for line in (run_dir / name).read_text().splitlines()]
