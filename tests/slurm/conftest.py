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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """A failed test tells what the daemons have logged last."""
    report = yield
    made = getattr(item, "funcargs", {}).get("cluster")
    if report.failed and made is not None:
        for path in sorted(made.folder.glob("slurm*.log")):
            report.sections.append((path.name, "\n".join(path.read_text().splitlines()[-40:])))
    return report
