"""A sweep of jobs with two processes each, really started (the ranks count instead of training)."""

import functools
import json
from pathlib import Path

import pytest

from twinkle_research.config.cli import main
from twinkle_research.distributed import launcher


@pytest.mark.long
def test_a_sweep_of_two_process_jobs(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(root / "tests" / "distributed"))
    monkeypatch.setattr(launcher, "start", functools.partial(launcher.start, entry="toy_runs:count"))
    words = ["-m", "model=tiny", "backend.device=cpu", "launch.nproc_per_node=2", "hydra.sweep.dir=sweeps/x"]
    assert main([*words, "trainer.max_steps=1,2"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sweeps"]
    assert sorted(path.name for path in (tmp_path / "sweeps" / "x").iterdir()) == [
        "0", "1", "multirun.yaml", "report.html", "sweep.json", "sweep.lock",
    ]  # fmt: skip
    for number, steps in ((0, 1), (1, 2)):
        folder = tmp_path / "sweeps" / "x" / str(number)
        status = json.loads((folder / "status.json").read_text())
        assert (status["state"], status["step"], status["objective"]) == ("finished", steps, 0.5)
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert [(row["step"], row["ranks"]) for row in rows] == [(step, 2) for step in range(1, steps + 1)]
    # The same words again find finished runs; a job that is given more to do goes on from where it was.
    assert main([*words, "trainer.max_steps=1,3"]) == 0
    assert json.loads((tmp_path / "sweeps" / "x" / "1" / "status.json").read_text())["step"] == 3
    assert "this run is finished" in capfd.readouterr().out
