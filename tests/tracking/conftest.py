"""Runs of the trackers in processes of their own, with a home folder that must stay empty, and a W&B server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from wandb_server import WandbServer

ROOT = Path(__file__).resolve().parent.parent.parent
API_KEY = "a" * 40


@pytest.fixture
def server() -> Iterator[WandbServer]:
    server = WandbServer()
    yield server
    server.close()


@pytest.fixture
def launch(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess]:
    """``launch(**options)`` runs tracked_run.py; ``server=...`` points W&B there. The result has ``.report`` if it ended."""
    home = tmp_path / "home"
    home.mkdir()

    def launch(*, server: WandbServer | str | None = None, env: dict[str, str] | None = None, **options):
        environment = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
        environment |= {"HOME": str(home), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        if server is not None:
            environment |= {"WANDB_BASE_URL": server if isinstance(server, str) else server.url, "WANDB_API_KEY": API_KEY}
        options = {"folder": str(tmp_path / "run"), "mode": "offline"} | options
        script = Path(__file__).with_name("tracked_run.py")
        command = [sys.executable, str(script), json.dumps(options)]
        done = subprocess.run(command, env=environment | (env or {}), cwd=tmp_path, capture_output=True, text=True, timeout=120)
        if not options.get("kill"):
            assert done.returncode == 0, done.stdout + done.stderr
            done.report = json.loads(done.stdout.splitlines()[-1])
        assert list(home.rglob("*")) == [], "nothing may be written to the home folder"
        return done

    return launch
