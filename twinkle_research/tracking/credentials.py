"""Whether W&B is used, and how. Light: nothing here imports wandb, so the run plan can say it before anything starts."""

from __future__ import annotations

import configparser
import netrc
import os
from pathlib import Path
from urllib.parse import urlsplit

from twinkle_research.errors import ConfigError, nearest
from twinkle_research.tracking.config import WandbConfig, WandbMode

DEFAULT_URL = "https://api.wandb.ai"
_loaded_from: set[Path] = set()


def load_dotenv_once(folder: Path | None = None) -> bool:
    """Reads ``.env`` of the current folder into the environment; what the environment already has wins.

    Returns whether this call read a file. Later calls for the same folder do nothing.
    """
    path = (folder or Path.cwd()) / ".env"
    if path in _loaded_from or not path.is_file():
        return False
    _loaded_from.add(path)
    from dotenv import load_dotenv

    return load_dotenv(path, override=False)


def user_settings_file() -> Path:
    """Where ``wandb login --host`` keeps the address of a self-hosted server."""
    return Path(os.environ.get("WANDB_CONFIG_DIR") or Path.home() / ".config" / "wandb") / "settings"


def base_url() -> str:
    """The server's address: WANDB_BASE_URL, else the one of an earlier ``wandb login``, else the public one."""
    if url := os.environ.get("WANDB_BASE_URL"):
        return url.rstrip("/")
    settings = configparser.ConfigParser(interpolation=None)
    try:
        settings.read(user_settings_file())
    except configparser.Error:
        return DEFAULT_URL  # wandb itself names a settings file that it cannot read
    return settings.get("default", "base_url", fallback=DEFAULT_URL).rstrip("/")


def has_api_key() -> bool:
    """A key in the environment, or in the netrc file for the server's host (where ``wandb login`` puts it)."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    named = os.environ.get("NETRC")
    paths = [Path(named)] if named else [Path.home() / ".netrc", Path.home() / "_netrc"]
    host = urlsplit(base_url()).netloc
    for path in paths:
        try:
            entry = netrc.netrc(path).authenticators(host)
        except (OSError, netrc.NetrcParseError):
            continue
        if entry and entry[2]:
            return True
    return False


def resolve_mode(cfg: WandbConfig) -> WandbMode:
    """``cfg.mode`` with ``auto`` decided: WANDB_MODE where set, else online with a key, else disabled.

    Raises ConfigError for online without a key (wandb would wait for one to be typed) and for an unknown WANDB_MODE.
    """
    load_dotenv_once()
    mode = cfg.mode
    wanted_by = "tracking.wandb.mode=online"
    if mode is WandbMode.auto:
        named = os.environ.get("WANDB_MODE", "").strip()
        if not named:
            return WandbMode.online if has_api_key() else WandbMode.disabled
        valid = [m.value for m in WandbMode]
        if named not in valid:
            raise ConfigError(f"WANDB_MODE={named} in the environment is not a mode; {nearest(named, valid)}")
        wanted_by = f"WANDB_MODE={named}"
        mode = WandbMode[named]
        if mode is WandbMode.auto:
            return WandbMode.online if has_api_key() else WandbMode.disabled
    if mode is WandbMode.online and not has_api_key():
        raise ConfigError(
            f"{wanted_by} needs an API key for {base_url()}: set WANDB_API_KEY (the environment or .env), run `wandb login`, "
            "or use tracking.wandb.mode=offline"
        )
    return mode
