"""What all tests share: one thread, no network, and nothing read from or written to the user's home."""

import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def isolate() -> Path:
    """Sets the environment that the tests and the processes that they start run in; returns a folder for this session.

    It is done at import, before any test module can import torch or transformers, which read it once.
    """
    session = Path(tempfile.mkdtemp(prefix="twinkle-tests-"))
    (session / "home").mkdir()
    # Prepared models are kept between sessions: their folder names hold a hash of what they are made from.
    cache = ROOT / ".cache" / "tests"
    cache.mkdir(parents=True, exist_ok=True)
    os.environ.update(
        HOME=str(session / "home"),
        HF_HOME=str(session / "huggingface"),
        TWINKLE_CACHE=str(cache),
        HF_HUB_OFFLINE="1",
        HF_DATASETS_OFFLINE="1",
        HF_HUB_DISABLE_TELEMETRY="1",
        WANDB_SILENT="true",
        TOKENIZERS_PARALLELISM="false",
        OMP_NUM_THREADS="1",
        MKL_NUM_THREADS="1",
        OPENBLAS_NUM_THREADS="1",
        COLUMNS="160",
    )
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DIR", "NETRC", "HYDRA_FULL_ERROR"):
        os.environ.pop(name, None)
    for name in [n for n in os.environ if n.startswith(("SLURM_", "TORCHELASTIC_"))] + ["RANK", "LOCAL_RANK", "WORLD_SIZE"]:
        os.environ.pop(name, None)
    # Real rows, where they lie beside the checkout; tests that read them can also make their own.
    data = ROOT.parent / "shared" / "data"
    if data.is_dir():
        os.environ.setdefault("TWINKLE_DATA", str(data))
    return session


# The processes of pytest-xdist inherit the environment of the first one.
SESSION_DIR = None if "PYTEST_XDIST_WORKER" in os.environ else isolate()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="fail when a test was skipped")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if SESSION_DIR is None:
        return
    shutil.rmtree(SESSION_DIR, ignore_errors=True)
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter is not None and reporter.stats.get("skipped")
    if skipped and session.config.getoption("--no-skips") and not session.exitstatus:
        session.exitstatus = 1
        reporter.write_line("--no-skips: skipped tests count as a failure", red=True)


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[None]:
    """As it was: a sweep in this process makes Hydra put a handler on it, whose stream is closed with the test."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = [handler for handler in root.handlers if handler in handlers]
    root.setLevel(level)


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def once(tmp_path_factory) -> Callable[[str, Callable[[Path], None]], Path]:
    """``once(name, make)``: a folder that ``make(folder)`` fills in one of the test processes, while the others wait."""
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own

    def folder_of(name: str, make: Callable[[Path], None]) -> Path:
        folder, done = shared / f"once-{name}", shared / f"once-{name}.done"
        with open(shared / f"once-{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                make(folder)
                done.touch()
        return folder

    return folder_of
