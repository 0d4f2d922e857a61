"""The Slurm cluster of the session, and jobs in it."""

from __future__ import annotations

import pytest
from cluster import COMMANDS, INSTALL, Cluster


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    if not all(COMMANDS.values()):
        pytest.skip(f"Slurm is not installed: {INSTALL}")  # .ci/run does that, and allows no skip
    made = Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        made.start()
        yield made
    finally:
        made.stop()
