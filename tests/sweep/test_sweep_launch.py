"""What a sweep starts, skips, records and says. Its jobs are quick (sweep_toys.py); composing and recording are real."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import sweep_toys

from twinkle_research.config import plan
from twinkle_research.config.cli import main
from twinkle_research.distributed import launcher
from twinkle_research.sweep.command import main as command
from twinkle_research.sweep.local import gpus_of, share, slots_of

SLURM = "hydra/launcher=submitit_slurm"
WORDS = ["-m", "model=tiny", "hydra.sweep.dir=sweeps/x"]


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """The folders of the jobs that are started."""
    monkeypatch.chdir(tmp_path)
    folders = []

    def start(cfg, plan, in_process):
        folders.append(Path(cfg.run_dir))
        return sweep_toys.quick(cfg, plan)

    monkeypatch.setattr(launcher, "start", start)
    return folders


def stored() -> dict:
    return json.loads(Path("sweeps/x/sweep.json").read_text())


def test_a_failed_job_ends_nothing_and_is_named(started: list[Path], capsys: pytest.CaptureFixture) -> None:
    assert main([*WORDS, "adapter.r=7,20,30"]) == 1
    out, err = capsys.readouterr()
    assert "1 of the sweep's jobs failed" in err and "sweeps/x/0 (the bowl is cracked at 7): model=tiny adapter.r=7" in err
    assert "2 finished, 1 failed" in out and f"best job    {Path('sweeps/x/1').absolute()}" in out
    assert [(job["state"], job["error"]) for job in stored()["jobs"]] == [
        ("failed", "the bowl is cracked at 7"), ("finished", None), ("finished", None),
    ]  # fmt: skip
    assert stored()["state"] == "failed" and stored()["keys"] == ["adapter.r"] and stored()["metric"] == "loss"
    page = Path("sweeps/x/report.html").read_text()
    assert page.index('scope="row"><span class="swatch" data-run="1"') < page.index(
        'scope="row"><span class="swatch" data-run="2"'
    )
    assert "the bowl is cracked at 7" in page


@pytest.mark.long
def test_resuming_runs_only_what_has_not_finished(started: list[Path], capsys: pytest.CaptureFixture) -> None:
    assert main([*WORDS, "seed=0,75,1"]) == 75  # a job that is stopped stops the sweep
    assert len(started) == 2 and [job["state"] for job in stored()["jobs"]] == ["finished", "stopped", "waiting"]
    assert "to go on    python -m twinkle_research.sweep resume" in capsys.readouterr().out
    assert command(["resume", "sweeps/x"]) == 75
    assert [path.name for path in started[2:]] == ["1"]
    Path("go").touch()  # what stopped it is gone
    assert command(["resume", "sweeps/x"]) == 0
    assert [path.name for path in started[3:]] == ["1", "2"]
    assert [job["state"] for job in stored()["jobs"]] == ["finished"] * 3 and stored()["state"] == "finished"


@pytest.mark.long
def test_the_same_words_again_do_the_same(started: list[Path]) -> None:
    assert main([*WORDS, "adapter.r=8,20"]) == 0
    assert main([*WORDS, "adapter.r=8,20,30"]) == 0
    assert [path.name for path in started] == ["0", "1", "2"]


@pytest.mark.long
def test_the_objectives_of_other_kinds_of_runs_are_not_compared(started: list[Path], capsys: pytest.CaptureFixture) -> None:
    assert main(["-m", "hydra.sweep.dir=sweeps/x", "loss=cross_entropy,grpo", "model=tiny_sums"]) in (0, 1)
    assert stored()["metric"] is None and "best job" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["hydra.job.chdir=true"], "'hydra.job.chdir' has no effect in a sweep"),
        (["hydra.sweep.subdir=x"], "the folder of job N is <hydra.sweep.dir>/N"),
        (["hydra/launcher=joblip"], "did you mean 'joblib'?"),
        (["hydra/launcher=joblib", "hydra.launcher.njobs=2"], "did you mean 'hydra.launcher.n_jobs'?"),
        (["hydra/launcher=joblib", "hydra.launcher.n_jobs=0"], "hydra.launcher.n_jobs=0"),
        (["hydra/launcher=submitit_local", "hydra.launcher.timeout_min=0"], "launcher.timeout_min must be at least 1, got 0"),
        (["hydra/launcher=submitit_local", "hydra.launcher.submitit_folder=x/%j"], "names such as %j are for Slurm"),
        ([SLURM, "hydra.launcher.nodes=0"], "hydra.launcher.nodes must be at least 1, got 0"),
        ([SLURM, "hydra.launcher.tasks_per_node=0"], "hydra.launcher.tasks_per_node must be at least 1, got 0"),
        ([SLURM, "hydra.launcher.gpus_per_node=-1"], "hydra.launcher.gpus_per_node must be at least 0, got -1"),
        ([SLURM, "hydra.launcher.timeout_min=3"], "timeout_min=3 (180 s) leaves none to train"),
        (["hydra/sweeper=optuna", "hydra.sweeper.n_trials=0"], "hydra.sweeper.n_trials must be at least 1, got 0"),
        (["hydra/sweeper=optuna", "hydra.sweeper.n_jobs=0"], "hydra.sweeper.n_jobs must be at least 1, got 0"),
        (["hydra/sweeper=optuna", "hydra.sweeper.sampler.n_startup_trials=-1"], "n_startup_trials must be at least 0, got -1"),
        (["hydra/sweeper=optuna", "hydra.sweeper.direction=maximize"], "loss, which is better when lower"),
        (["hydra/sweeper=optuna", "hydra.sweeper.direction=up"], "must be minimize or maximize"),
        (["hydra/sweeper=optuna", "dry_run=true"], "a study has no jobs before it runs"),
        (["hydra/sweeper=optuna", "loss=grpo", "adapter=lora", "data.eval_rows=0"], "let the runs be evaluated"),
        (["hydra/sweeper=optuna", "hydra/sweeper/sampler=grid", "optimizer.lr=interval(0,1)"], "'optimizer.lr' is an interval"),
        (["seed=range(5,1)"], "'seed=range(5,1)' holds no value"),
        (["seed=1,2,range(5,7)"], "'seed=1,2,range(5,7)': range() and interval() stand alone"),
        (["seed=range(1,5,0)"], "'seed=range(1,5,0)': the step of a range cannot be 0"),
        (["hydra.launcher=joblib"], "chosen with a slash: hydra/launcher=joblib"),
        (["sweeper=optuna"], "unknown key 'sweeper'; write hydra/sweeper"),
        (["hydra.launcher.n_jobs=2"], "it is a setting of hydra/launcher=joblib"),
        (["hydra.sweeper.n_trials=2"], "it is a setting of hydra/sweeper=optuna"),
        (["hydra/sweeper=optuna", "hydra.sweeper.n_startup_trials=2"], "'hydra.sweeper.sampler.n_startup_trials', of"),
        (["hydra/sweeper=optuna", "hydra.sweeper.metric=eval/loss"], "the objective is no setting"),
        (["hydra/launcher=joblib", "hydra.launcher.n_jobs=two"], "'hydra.launcher.n_jobs' must be a whole number, got 'two'"),
        (["optimizer.lr=1e-3,"], "values are written without spaces between them: optimizer.lr=1e-3,..."),
        (["optimizer.lr=[1e-3,1e-4]"], "leave out the brackets: optimizer.lr=0.001,0.0001"),
        (["optimizer.lr=loguniform(1e-5,1e-3)"], "(unknown function 'loguniform'); several values, with -m, are"),
        (["hydra.sweeper.max_batch_size=1"], "'hydra.sweeper.max_batch_size' has no effect here"),
        (["hydra/sweeper=optuna", "hydra.sweeper.storage=nonsense"], "hydra.sweeper.storage=nonsense: "),
        (["optimizer.lr=interval(0,1)"], "'optimizer.lr' is an interval; hydra/sweeper=optuna chooses from it"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_before_anything_is_written(
    words: list[str], message: str, started: list[Path], capsys: pytest.CaptureFixture
) -> None:
    assert main([*WORDS, "adapter.r=8,20", *words]) == 2
    assert message in capsys.readouterr().err
    assert not started and not Path("sweeps").exists()


def test_two_processes_never_write_to_one_sweep(started: list[Path], capsys: pytest.CaptureFixture) -> None:
    from twinkle_research.trainer.runlock import RunLock

    Path("sweeps/x").mkdir(parents=True)
    lock = RunLock(Path("sweeps/x/sweep.lock"))
    lock.acquire()
    try:
        assert main([*WORDS, "seed=0,1"]) == 1
    finally:
        lock.release()
    assert "another process writes to" in capsys.readouterr().err and not started


def test_shares_of_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "visible_gpus", lambda: 4)
    assert [gpus_of(slot, 2)["CUDA_VISIBLE_DEVICES"] for slot in range(2)] == ["0,1", "2,3"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,6,5,4")
    assert gpus_of(5, 8) == {"CUDA_VISIBLE_DEVICES": "6"}
    assert [share(list(range(8)), slot, 3) for slot in range(3)] == [[0, 1], [2, 3], [4, 5]]
    assert [share([0, 1], slot, 4) for slot in range(4)] == [[0], [1], [0], [1]]
    assert slots_of(3) == 3 and slots_of(-1) >= slots_of(-2) >= 1


@pytest.mark.long
def test_processes_through_submitit_leave_only_what_is_theirs(tmp_path: Path) -> None:
    words = [*WORDS, "backend.device=cpu", "trainer.max_steps=1", "adapter.r=16,20", "hydra/launcher=submitit_local"]
    text, _ = (process := sweep_toys.start("train", *words, cwd=tmp_path)).communicate(timeout=150)
    assert process.returncode == 0 and [job["state"] for job in stored()["jobs"]] == ["finished"] * 2, text
    sweep = tmp_path / "sweeps" / "x"
    assert sorted(path.name for path in sweep.iterdir() if path.is_dir()) == [".submitit", "0", "1"]
    numbers = sorted(job["cluster_id"] for job in stored()["jobs"])
    assert sorted(path.name for path in (sweep / ".submitit").iterdir()) == [
        f"{number}_{name}" for number in numbers for name in ("0_log.err", "0_log.out", "0_result.pkl", "submitted.pkl")
    ]
