"""The command line as a person meets it: exit codes, one screen, no torch, nothing written."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from twinkle_research.config.cli import main
from twinkle_research.config.completion import values_of
from twinkle_research.config.helptext import help_text
from twinkle_research.distributed import launcher
from twinkle_research.errors import ConfigError

# Runs train.py as it is and says at the end whether torch was imported.
WATCHED = """
import atexit, os, sys, runpy
atexit.register(lambda: os.write(2, b"TORCH\\n") if "torch" in sys.modules else None)
sys.argv = ["train.py", *sys.argv[1:]]
runpy.run_path(os.path.join({root!r}, "train.py"), run_name="__main__")
"""


@pytest.fixture
def run(root: Path, tmp_path: Path):
    def call(*words: str, **environ: str) -> subprocess.CompletedProcess:
        (tmp_path / "cwd").mkdir(exist_ok=True)
        return subprocess.run(
            [sys.executable, "-c", WATCHED.format(root=str(root)), *words],
            cwd=tmp_path / "cwd",
            env=os.environ | {"PYTHONPATH": str(root)} | environ,
            capture_output=True,
            text=True,
            timeout=120,
        )

    return call


def written(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "cwd").rglob("*"))


@pytest.mark.parametrize(
    "words",
    [
        ["optimzer.lr=1e-4"],
        ["+loss.foo=1"],
        ["adapter.r=0"],
        ["adapter.target_modules=[q_proj,v_porj]"],
        ["data=jsonl", "data.path=none.jsonl"],
        ["--cfg", "job", "optimizer.lrr=1"],
        ["-m", "optimizer.lr=1e-4,abc"],
        ["-m", "adapter.r=8,0"],
        ["--optimizer.lr", "3"],
        ["run_dir=${out.rot}"],
        ["--config-dir=/nonexistent", "model=tiny"],
        ["dry_run=true", "--config-name=foo"],
        ["dry_run=true", "--cfg", "job", "--package", "foo"],
        ["dry_run=true", "--info", "nonsense"],
    ],
)
def test_a_config_error_is_short_and_ends_with_2(words: list[str], run, tmp_path: Path) -> None:
    done = run(*words, HYDRA_FULL_ERROR="0")
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("config error: ")
    assert "Traceback" not in done.stderr and "TORCH" not in done.stderr
    assert len(done.stderr.splitlines()) < 10 and "hydra.sweep.dir" not in done.stderr
    left = written(tmp_path)
    assert "run plan" not in done.stdout
    assert left == [] or "-m" in words


@pytest.mark.parametrize(
    "words",
    [
        ["dry_run=true"],
        ["dry_run=true", "experiment=muon_full"],
        ["dry_run=true", "backend=megatron", "backend.tensor_parallel=3", "backend.pipeline_parallel=2"],
        ["-m", "dry_run=true", "optimizer.lr=1e-4,1e-3"],
        ["model=tiny", "-m", "optimizer.lr=1e-4,1e-3", "dry_run=true"],
        ["-m", "loss=grpo,rloo", "rollout.num_generations=4", "dry_run=true"],  # a setting that only the swept options have
        ["dry_run=true", "--info"],
        ["dry_run=true", "--info", "config", "model=tiny"],
        ["--cfg", "job"],
        ["--cfg", "job", "--resolve"],
        ["--cfg", "job", "-p", "optimizer"],
        ["--info", "defaults"],
        ["--help"],
        ["--hydra-help"],
        ["--version"],
    ],
)
def test_looking_writes_nothing_and_needs_no_torch(words: list[str], run, tmp_path: Path) -> None:
    done = run(*words)
    assert done.returncode == 0, done.stderr
    assert "TORCH" not in done.stderr and done.stdout.strip()
    assert written(tmp_path) == []


def test_package_import_is_light(root: Path) -> None:
    ours = "twinkle_research, twinkle_research.config, twinkle_research.errors, twinkle_research.data_format"
    heavy = "'torch', 'transformers', 'datasets', 'wandb', 'hydra'"
    code = f"import sys, {ours}; sys.exit(any(name in sys.modules for name in ({heavy})))"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": str(root)})


def test_plan_tells_what_matters(capsys: pytest.CaptureFixture) -> None:
    assert main(["model=tiny", "dry_run=true", "run_dir=runs/mine", "trainer.max_steps=7", "launch.nproc_per_node=2"]) == 0
    text = capsys.readouterr().out
    for expected in (
        "tiny",
        "853 k parameters",
        "7 optimizer steps",
        "data-parallel over 2 processes",
        "runs/mine",
        "lr 0.0005",
        "GiB",
    ):
        assert expected in text
    assert len(text.splitlines()) < 25
    assert main(["dry_run=true", "model=hf", "model.path=some/model"]) == 0
    assert "not in the local cache" in capsys.readouterr().out


def test_hydra_flags_lead_to_the_same_run(tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\ntrainer:\n  max_steps: 13\n")
    monkeypatch.chdir(tmp_path)
    assert main(["--config-dir", str(tmp_path), "experiment=mine", "dry_run=true", "model=tiny"]) == 0
    assert "13 optimizer steps" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["experiment"]


# --- sweeps ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list:
    """What would be started; the exit code of a job is its `seed`."""
    monkeypatch.chdir(tmp_path)
    jobs = []

    def start(config, plan, in_process):
        jobs.append((config, in_process))
        return config.seed

    monkeypatch.setattr(launcher, "start", start)
    return jobs


def test_a_plain_run_starts_here_in_a_new_folder(started: list, tmp_path: Path) -> None:
    assert main(["model=tiny"]) == 0
    [(config, in_process)] = started
    assert in_process and Path(config.run_dir).parent == Path("runs") and Path(config.run_dir).is_dir()
    assert main(["model=tiny", "run_dir=here", "seed=1"]) == 1
    assert started[1][0].run_dir == "here"


def test_a_sweep_makes_one_folder_a_job(started: list, tmp_path: Path) -> None:
    assert main(["-m", "model=tiny", "optimizer.lr=1e-4,1e-3", "adapter.r=1,2", "hydra.sweep.dir=sweeps/x"]) == 0
    assert [Path(config.run_dir) for config, _ in started] == [Path("sweeps/x").resolve() / str(i) for i in range(4)]
    assert [(config.optimizer.lr, config.adapter.r) for config, _ in started] == [(1e-4, 1), (1e-4, 2), (1e-3, 1), (1e-3, 2)]
    assert not any(in_process for _, in_process in started)
    assert all(config.tracking.wandb.group == "x" for config, _ in started)
    files = ["multirun.yaml", "sweep.json", "sweep.lock"]
    assert sorted(path.name for path in (tmp_path / "sweeps" / "x").iterdir()) == ["0", "1", "2", "3", *files]
    assert not any((tmp_path / "sweeps" / "x" / "0").iterdir())


def test_a_sweep_without_wandb(started: list) -> None:
    """Its jobs are a group nowhere."""
    assert main(["-m", "optimizer.lr=1e-4,1e-3", "tracking.wandb.mode=disabled"]) == 0
    assert [config.tracking.wandb.group for config, _ in started] == [None, None]


def test_a_job_is_told_that_a_rank_was_refused(tmp_path: Path, monkeypatch) -> None:
    """Where it was killed by another's end, srun tells the job nothing but that."""
    monkeypatch.setenv("TWINKLE_REFUSAL", str(tmp_path / "refusal"))
    assert main(["data=jsonl", "data.path=none.jsonl"]) == 2
    assert "none.jsonl: no such file" in (tmp_path / "refusal").read_text()


def test_a_failed_job_does_not_stop_the_sweep_but_its_exit_code(started: list, capsys: pytest.CaptureFixture) -> None:
    assert main(["-m", "model=tiny", "seed=0,1,0", "hydra.sweep.dir=s"]) == 1
    assert len(started) == 3
    message = capsys.readouterr().err
    assert "1 of the sweep's jobs failed" in message and "s/1 (exit code 1): model=tiny seed=1" in message


@pytest.mark.parametrize("code", [75, 130])
def test_a_stopped_job_stops_the_sweep(code: int, started: list) -> None:
    assert main(["-m", "model=tiny", f"seed=0,{code},0", "hydra.sweep.dir=s"]) == code
    assert len(started) == 2


def test_sweeps_that_cannot_be(started: list, monkeypatch, capsys: pytest.CaptureFixture) -> None:
    assert main(["-m", "model=tiny", "seed=0,1", "run_dir=x"]) == 2
    assert "hydra.sweep.dir=" in capsys.readouterr().err
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert main(["-m", "model=tiny", "seed=0,1"]) == 2
    assert "--multirun under torchrun" in capsys.readouterr().err
    assert not started
    monkeypatch.setenv("RANK", "1")
    assert main(["optimizer.lrr=1"]) == 2
    assert capsys.readouterr().err == ""  # rank 0 says it


def test_a_sweep_named_in_a_file_is_a_sweep(started: list, tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "grid.yaml").write_text(
        "# @package _global_\nhydra:\n  mode: MULTIRUN\n  sweeper:\n    params:\n      optimizer.lr: 1e-4,1e-3\n"
    )
    assert main([f"hydra.searchpath=[file://{tmp_path}]", "experiment=grid", "model=tiny", "hydra.sweep.dir=s"]) == 0
    assert [config.optimizer.lr for config, _ in started] == [1e-4, 1e-3]


# --- help and completion --------------------------------------------------------------------------------------------


def test_help_names_groups_options_and_keys() -> None:
    text = help_text([])
    for expected in (
        "smollm2_135m | hf | llama3_1_70b",
        "adamw | adam | adamw_preference | adamw_rl | muon | sgd",
        "own_data",
        "run_dir=null",
        "--cfg job",
        "75 stopped",
    ):
        assert expected in text
    assert max(map(len, text.splitlines())) <= 120
    assert "base_" not in text


def test_help_on_a_group_and_on_a_key(capsys: pytest.CaptureFixture) -> None:
    assert "ns_steps: 5" in help_text(["optimizer"]) and "defaults:" not in help_text(["optimizer"])
    assert "normalization: token" in help_text(["loss"])
    assert "override /data: jsonl" in help_text(["experiment"])
    assert "Rows in one optimizer step" in help_text(["trainer.batch_size"])
    assert "wandb.mode=auto" in help_text(["tracking.wandb.mode"])
    assert "Every random draw" in help_text(["seed"])
    with pytest.raises(ConfigError, match=r"did you mean 'optimizer'"):
        help_text(["optimzer"])
    assert main(["--help", "optimizer.lrr"]) == 2
    assert "did you mean 'optimizer.lr'" in capsys.readouterr().err
    assert main(["--help", "lr"]) == 2
    assert "--help lr: did you mean 'optimizer.lr'?" in capsys.readouterr().err


def test_values_that_complete() -> None:
    assert values_of("backend.sharding") == ["auto", "none", "ddp", "fsdp2"]
    assert values_of("dry_run") == ["true", "false"]
    assert values_of("optimizer.lr") == values_of("no.such.key") == []


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("opti", ["optimizer.", "optimizer="]),
        ("optimizer=", [f"optimizer={name}" for name in ("adam", "adamw", "adamw_preference", "adamw_rl", "muon", "sgd")]),
        ("optimizer=sgd optimizer.m", ["optimizer.momentum="]),
        ("backend.sharding=d", ["backend.sharding=ddp"]),
        ("dry_run=", ["dry_run=true", "dry_run=false"]),
        ("experiment=o", ["experiment=own_data"]),
        ("optimizer=nonsense optimizer.l", []),
    ],
)
def test_completion(line: str, expected: list[str], monkeypatch, capfd: pytest.CaptureFixture) -> None:
    monkeypatch.setenv("COMP_LINE", f"python train.py {line}")
    monkeypatch.setenv("COMP_POINT", str(len(f"python train.py {line}")))
    assert main(["-sc", "query=bash"]) == 0
    assert sorted(capfd.readouterr().out.split()) == sorted(expected)


def test_completion_installs(root: Path) -> None:
    """The script that bash evaluates, in a real bash."""
    script = 'eval "$(python train.py -sc install=bash)"; complete -p python'
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script], cwd=root, env=os.environ | {"PATH": path}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "hydra_bash_completion" in done.stdout
