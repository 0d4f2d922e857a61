"""Runs of the trackers in processes of their own, and a W&B server."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tracked_run import launcher
from wandb_server import WandbServer


@pytest.fixture
def server() -> Iterator[WandbServer]:
    server = WandbServer()
    yield server
    server.close()


@pytest.fixture
def launch(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess]:
    """Runs tracked_run.py; its run folder is ``tmp_path / "run"``."""
    return launcher(tmp_path)
