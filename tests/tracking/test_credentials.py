"""How ``tracking.wandb.mode`` is decided, without importing wandb."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from tracked_run import ROOT

from twinkle_research.errors import ConfigError
from twinkle_research.tracking import credentials
from twinkle_research.tracking.config import WandbConfig, WandbMode

KEY = "k" * 40


@pytest.fixture(autouse=True)
def clean(monkeypatch, tmp_path):
    """No key anywhere; a home folder and a current folder of our own."""
    for name in [n for n in os.environ if n.startswith("WANDB")] + ["NETRC"]:
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    credentials._loaded_from.clear()
    yield
    os.environ.pop("WANDB_API_KEY", None)  # what a test's .env has set
    os.environ.pop("WANDB_PROJECT_OF_TEST", None)


def resolve(mode: str) -> str:
    return credentials.resolve_mode(WandbConfig(mode=WandbMode[mode])).value


def test_auto_without_a_key_is_disabled():
    assert resolve("auto") == "disabled"


def test_auto_with_a_key_in_the_environment(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    assert resolve("auto") == "online" and resolve("disabled") == "disabled" and resolve("offline") == "offline"


@pytest.mark.parametrize("where", ["home", "NETRC"])
def test_auto_with_a_key_in_netrc(monkeypatch, tmp_path, where):
    path = tmp_path / "home" / ".netrc" if where == "home" else tmp_path / "secrets"
    path.write_text(f"machine api.wandb.ai\n  login user\n  password {KEY}\n")
    path.chmod(0o600)
    if where == "NETRC":
        monkeypatch.setenv("NETRC", str(path))
    assert resolve("auto") == "online"
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert resolve("auto") == "disabled"  # a key for another server


def test_self_hosted_server_of_wandb_login(tmp_path):
    settings = tmp_path / "home" / ".config" / "wandb" / "settings"
    settings.parent.mkdir(parents=True)
    settings.write_text("[default]\nbase_url = https://wandb.example.org:8443\n")
    netrc = tmp_path / "home" / ".netrc"
    netrc.write_text(f"machine wandb.example.org:8443\n  login user\n  password {KEY}\n")
    netrc.chmod(0o600)
    assert credentials.base_url() == "https://wandb.example.org:8443" and resolve("auto") == "online"
    settings.write_text("no section")
    assert credentials.base_url() == credentials.DEFAULT_URL


def test_dotenv_is_read_once_and_the_environment_wins(monkeypatch, tmp_path):
    (tmp_path / ".env").write_text(f"WANDB_API_KEY={KEY}\nWANDB_PROJECT_OF_TEST=from-file\n")
    monkeypatch.setenv("WANDB_PROJECT_OF_TEST", "from-environment")
    assert resolve("auto") == "online"
    assert os.environ["WANDB_API_KEY"] == KEY and os.environ["WANDB_PROJECT_OF_TEST"] == "from-environment"
    del os.environ["WANDB_API_KEY"]
    assert credentials.load_dotenv_once() is False and "WANDB_API_KEY" not in os.environ


def test_online_without_a_key_is_refused():
    with pytest.raises(ConfigError, match=r"tracking\.wandb\.mode=online needs an API key.*WANDB_API_KEY.*offline"):
        resolve("online")


def test_wandb_mode_of_the_environment_decides_auto_only(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert resolve("auto") == "offline" and resolve("disabled") == "disabled"
    monkeypatch.setenv("WANDB_MODE", "ofline")
    with pytest.raises(ConfigError, match="WANDB_MODE=ofline.*did you mean 'offline'"):
        resolve("auto")
    monkeypatch.setenv("WANDB_MODE", "online")
    with pytest.raises(ConfigError, match="WANDB_MODE=online needs an API key"):
        resolve("auto")


def test_building_a_tracker_without_wandb_imports_neither_wandb_nor_tensorboard(tmp_path):
    """A start pays only for what it uses; TensorBoard is loaded at the first row."""
    code = (
        "import sys; from pathlib import Path; from tracked_run import config\n"
        "from twinkle_research.tracking.build import build_tracker\n"
        "t = build_tracker(config(), Path(sys.argv[1]), total_steps=1, resume_step=0, wandb_run_id=None, is_main=True)\n"
        "print([m for m in ('wandb', 'tensorboard', 'torch', 'numpy') if m in sys.modules])\n"
        "t.log_step(1, {'loss': 1.0}); print('torch' in sys.modules)"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tests" / "tracking")))}
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0] == "[]" and done.stdout.splitlines()[-1] == "False"
