"""What a report is made of: the files of one run folder, read whether the run has ended or not."""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from twinkle_research.errors import UserError
from twinkle_research.tracking.files import METRICS, SAMPLES, TIMING, read_rows

SWEEP = "sweep.json"  # lists the jobs of a sweep, in its folder


@dataclass
class RunData:
    """``config``: nested as in config.yaml. ``state``: running, finished, failed, stopped or unknown."""

    path: Path
    name: str
    config: dict[str, Any]
    config_text: str
    status: dict[str, Any]
    metrics: list[dict[str, Any]]
    timing: list[dict[str, Any]]
    samples: list[dict[str, Any]]

    @property
    def state(self) -> str:
        return self.status.get("state", "unknown")

    @property
    def steps(self) -> int:
        return self.metrics[-1]["step"] if self.metrics else 0

    @property
    def seconds(self) -> float:
        """Wall time of the steps that count: what a crash had thrown away is not in it."""
        return sum(row.get("step_seconds") or 0.0 for row in self.timing)

    @property
    def tokens(self) -> int:
        return sum(row.get("tokens") or 0 for row in self.metrics)


def is_run(folder: Path) -> bool:
    return (folder / METRICS).is_file() or (folder / "config.yaml").is_file()


def find_runs(paths: list[Path]) -> list[Path]:
    """The run folders among ``paths``; a folder of runs (a sweep), or of such folders, stands for those in it, in the order of
    their names.

    Raises UserError for a path that is neither, naming the nearest folder.
    """
    found = []
    for path in paths:
        if is_run(path):
            found.append(path)
            continue
        inside = _runs_in(path, depth=2)
        if not inside:
            near = []
            if path.parent.is_dir():
                near = difflib.get_close_matches(path.name, [p.name for p in path.parent.iterdir() if is_run(p)], n=1)
            hint = f"; did you mean {path.parent / near[0]}?" if near else ""
            raise UserError(f"{path} is not a run folder (it has no {METRICS}) and holds none{hint}")
        found += inside
    return list(dict.fromkeys(path.resolve() for path in found))


def _runs_in(folder: Path, depth: int) -> list[Path]:
    """Job 10 of a sweep comes after job 9."""
    children = [child for child in folder.iterdir() if child.is_dir()] if folder.is_dir() else []
    children.sort(key=lambda p: (not p.name.isdigit(), int(p.name) if p.name.isdigit() else 0, p.name))
    deeper = [run for child in children if depth > 1 and not is_run(child) for run in _runs_in(child, depth - 1)]
    return [child for child in children if is_run(child)] + deeper


def load_runs(paths: list[Path]) -> list[RunData]:
    runs = [load_run(path) for path in paths]
    names = [run.name for run in runs]
    for run in runs:
        if names.count(run.name) > 1 or run.name.isdigit():
            run.name = f"{run.path.parent.name}/{run.path.name}"
    return runs


def load_run(path: Path) -> RunData:
    """Raises UserError where config.yaml or status.json cannot be read."""
    config_file, status_file = path / "config.yaml", path / "status.json"
    config_text = config_file.read_text(encoding="utf-8") if config_file.is_file() else ""
    try:
        config = yaml.safe_load(config_text) or {}
        status = json.loads(status_file.read_text(encoding="utf-8")) if status_file.is_file() else {}
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{path}: config.yaml or status.json cannot be read: {error}") from error
    config.pop("schema", None)  # which dataclass types each section; no setting
    return RunData(
        path=path,
        name=path.resolve().name,
        config=config,
        config_text=config_text,
        status=status,
        metrics=read_rows(path / METRICS),
        timing=read_rows(path / TIMING),
        samples=read_rows(path / SAMPLES),
    )


def flatten(config: Any, prefix: str = "") -> dict[str, Any]:
    """``{"model.dtype": "float32", ...}``; lists stay whole."""
    if not isinstance(config, dict):
        return {prefix: config}
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return flat


def differing_keys(runs: list[RunData]) -> list[tuple[str, list[Any]]]:
    """Settings that are not the same in all runs, with each run's value (None where it has no such key)."""
    flats = [flatten(run.config) for run in runs]
    keys = dict.fromkeys(key for flat in flats for key in flat)
    rows = [(key, [flat.get(key) for flat in flats]) for key in keys if key != "run_dir"]
    return [(key, values) for key, values in rows if any(value != values[0] for value in values)]
