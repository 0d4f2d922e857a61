"""Invariant 3: killed at any moment and started again, a run ends as if nothing had happened, bit for bit."""

import os
import random
import signal
import time

import pytest
from children import wait
from runs import die, fingerprint, killed_after, rows, train_in_child, train_in_fork

from twinkle_research.trainer.loop import TrainingLoop

# Two epochs with a short last batch, shuffled, dropout on, evaluations in between.
RUN = ["trainer.epochs=2", "adapter.dropout=0.2", "checkpoint.every=1", "data.eval_rows=3", "trainer.eval_every=4",
       "scheduler=cosine", "scheduler.warmup_steps=3"]  # fmt: skip
STEPS = 10  # 20 rows by 4, twice


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    assert train_in_child(run_dir, *RUN) == 0
    steps = [row["step"] for row in rows(run_dir)]
    assert steps == list(range(STEPS + 1))
    return fingerprint(run_dir)


@pytest.mark.parametrize("step", range(1, STEPS))
def test_killed_after_each_step(undisturbed, tmp_path, step):
    assert train_in_child(tmp_path, *RUN, before=lambda: killed_after(step)) == -signal.SIGKILL
    assert train_in_child(tmp_path, *RUN) == 0
    assert fingerprint(tmp_path) == undisturbed


@pytest.mark.parametrize("step", [1, 5, 9])
def test_stopped_by_a_signal(undisturbed, tmp_path, step):
    """A first SIGTERM saves, even where no checkpoint is due, and leaves with 75."""
    rare = [*RUN, "checkpoint.every=1000"]

    def signalled():
        inner = TrainingLoop.optimize

        def optimize(self, features, **loss_inputs):
            if self.step == step - 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return inner(self, features, **loss_inputs)

        TrainingLoop.optimize = optimize

    assert train_in_child(tmp_path, *rare, before=signalled) == 75
    stopped_at = rows(tmp_path)[-1]["step"]
    assert step <= stopped_at <= step + 1
    assert (tmp_path / "checkpoints" / "latest").read_text().strip() == f"step-{stopped_at:06d}"
    assert train_in_child(tmp_path, *rare) == 0
    assert fingerprint(tmp_path) == undisturbed


@pytest.mark.long
@pytest.mark.timeout(600)
def test_thirty_kills_at_random_moments(undisturbed, tmp_path):
    draw = random.Random(20)
    begun = time.monotonic()
    assert train_in_child(tmp_path / "timed", *RUN) == 0
    whole = time.monotonic() - begun
    kills = 0
    for attempt in range(100):
        run_dir = tmp_path / f"run-{attempt}"
        code = None
        while code != 0:
            pid = train_in_fork(run_dir, *RUN)
            if kills < 30:
                time.sleep(draw.uniform(0.05, whole))
                os.kill(pid, signal.SIGKILL)
            code = wait(pid)
            assert code in (0, -signal.SIGKILL)
            kills += code != 0
        assert fingerprint(run_dir) == undisturbed
        if kills >= 30:
            return
    pytest.fail(f"only {kills} kills hit a running process")


class WritePoints:
    """Counts the moments of a save at which a crash leaves something different on the disk; dies at the chosen one."""

    CALLS = ("open", "write", "fsync", "rename", "replace", "mkdir", "rmdir", "unlink")

    def __init__(self, die_at=None):
        self.die_at = die_at
        self.seen = 0

    def __enter__(self):
        for name in self.CALLS:
            setattr(os, name, self.counting(getattr(os, name)))

    def counting(self, call):
        def counted(*args, **kwargs):
            self.seen += 1
            if self.seen == self.die_at:
                die()
            return call(*args, **kwargs)

        return counted

    def __exit__(self, *_):
        pass  # the child ends with its save


def save_with(points, step):
    """In a child: ``points`` watch the save after ``step``."""
    inner = TrainingLoop.save

    def save(self):
        if self.step != step:
            return inner(self)
        with points:
            inner(self)
        os._exit(min(points.seen, 255))

    TrainingLoop.save = save


def kill_inside_save(tmp_path, points_to_try):
    """Three steps, each saved; the second save is cut, with the first one behind it."""
    short = [*RUN, "trainer.max_steps=3", "scheduler.warmup_steps=1", "data.eval_rows=0", "trainer.eval_every=null"]
    assert train_in_child(tmp_path / "undisturbed", *short) == 0
    undisturbed = fingerprint(tmp_path / "undisturbed")
    count = train_in_child(tmp_path / "count", *short, before=lambda: save_with(WritePoints(), 2))
    assert 10 < count < 255
    for point in points_to_try(count):
        run_dir = tmp_path / f"point-{point}"
        assert train_in_child(run_dir, *short, before=lambda: save_with(WritePoints(point), 2)) == -signal.SIGKILL  # noqa: B023
        assert train_in_child(run_dir, *short) == 0
        assert fingerprint(run_dir) == undisturbed, f"killed at write point {point} of {count}"


def test_killed_inside_a_save(tmp_path):
    """A sample of the points; tests/checkpoint cuts a save at each of them, without a model around it."""
    kill_inside_save(tmp_path, lambda count: range(1, count + 1, 8))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_inside_each_write_of_a_save(tmp_path):
    kill_inside_save(tmp_path, lambda count: range(1, count + 1))
