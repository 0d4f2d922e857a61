"""Invariant 8: a process that dies at any point of a save leaves a whole checkpoint behind, and the next save works."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

DRIVER = Path(__file__).with_name("crash_driver.py")
SCENARIOS = ["first", "second", "repeated", "only_one_repeated", "after_a_crash"]


def crash_everywhere(folder: Path, root: Path, scenario: str, mode: str) -> dict:
    command = [sys.executable, str(DRIVER), str(folder), scenario, mode]
    result = subprocess.run(command, cwd=root, env=_environment(root), capture_output=True, text=True, timeout=170)
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout)


def _environment(root: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(root)}


def check(result: dict) -> None:
    assert result["failures"] == []
    assert result["points"] >= 40  # every write (twice), rename, flush, creation and deletion
    # First the state before the save, from one moment on the state after it; never anything else, never back.
    assert result["outcomes"] == sorted(result["outcomes"], reverse=True)
    assert {"old", "new"} == set(result["outcomes"])


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_power_loss_at_every_point_of_a_save(tmp_path, root, scenario):
    check(crash_everywhere(tmp_path, root, scenario, "power-loss"))


@pytest.mark.parametrize("scenario", ["second", "repeated", *(pytest.param(s, marks=pytest.mark.slow) for s in SCENARIOS if s not in ("second", "repeated"))])
def test_kill_at_every_point_of_a_save(tmp_path, root, scenario):
    check(crash_everywhere(tmp_path, root, scenario, "kill"))
