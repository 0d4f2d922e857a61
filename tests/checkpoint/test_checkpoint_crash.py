"""Invariant 8: a process that dies at any point of a save leaves a whole checkpoint behind, and the next save works."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(500)  # 20 CPU seconds, but it waits for the disk on a busy machine
DRIVER = Path(__file__).with_name("crash_driver.py")
SCENARIOS = ["first", "second", "repeated", "only_one_repeated", "after_a_crash"]
KILLED = ["second", "repeated"]  # power loss is the harder case; the other scenarios are killed in the slow tests


def crash_everywhere(folder: Path, root: Path, mode: str, scenarios: list[str]) -> dict:
    command = [sys.executable, str(DRIVER), str(folder), mode, *scenarios]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    result = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=480)
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def power_loss(tmp_path_factory, root):
    return crash_everywhere(tmp_path_factory.mktemp("power-loss"), root, "power-loss", SCENARIOS)


@pytest.fixture(scope="module")
def kill(tmp_path_factory, root):
    return crash_everywhere(tmp_path_factory.mktemp("kill"), root, "kill", KILLED)


def check(result: dict) -> None:
    assert result["failures"] == []
    assert result["points"] >= 40  # before every write, rename, flush, creation and deletion, and inside every write
    # First the state before the save, from one moment on the state after it; never anything else, never back.
    assert result["outcomes"] == sorted(result["outcomes"], reverse=True)
    assert {"old", "new"} == set(result["outcomes"])


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_power_loss_at_every_point_of_a_save(power_loss, scenario):
    check(power_loss[scenario])


@pytest.mark.parametrize("scenario", KILLED)
def test_kill_at_every_point_of_a_save(kill, scenario):
    check(kill[scenario])


@pytest.mark.slow
def test_kill_at_every_point_of_the_other_saves(tmp_path, root):
    others = [scenario for scenario in SCENARIOS if scenario not in KILLED]
    for result in crash_everywhere(tmp_path, root, "kill", others).values():
        check(result)


@pytest.mark.long
@pytest.mark.parametrize("background", [False, True])
def test_kill_one_of_two_processes_that_save_together(tmp_path, root, background):
    """checkpoint.format=sharded: neither waits for the other for ever, and the older checkpoint stays until the new one is
    whole (case S20)."""
    command = [sys.executable, str(DRIVER.with_name("sharded_crash_driver.py")), str(tmp_path), str(int(background))]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=480)
    assert done.returncode == 0, done.stderr[-2000:]
    main, other = json.loads(done.stdout)
    check(main)
    # What the other process writes is never the last word: the main one gives the folder its name after both have ended.
    assert other["failures"] == [] and other["points"] >= 10 and set(other["outcomes"]) == {"old"}
