"""No setting without effect: every leaf of conf/ is read by the code that acts on it.

Tiny runs with real parts are traced: each read of a setting is recorded with the place that reads it. Copying a whole
config (to store it, to show it, to compare it) and checking it do not count as reading.
"""

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest

from twinkle_research.config import compose, save_config, to_object, validate
from twinkle_research.config.cli import start_run
from twinkle_research.config.keys import all_keys
from twinkle_research.distributed.env import WorldInfo
from twinkle_research.trainer.config import TrainConfig

# Frames that look at settings only to check, copy or show them.
NOT_READERS = ("dataclasses.py", "copy.py", "config/checks.py", "config/inputs.py", "config/memory.py", "config/resume.py")
NOT_READERS += ("config/storage.py", "config/keys.py", "config/composing.py", "test_leaves_are_read.py")
SHOWING = ("print_plan", "_rows", "_warnings", "_model_text", "_adapter_text", "_length_text", "_batch_text", "_folder_text", "_wandb_text")

# `name` says which option a section is, and architecture describes a shipped model: neither can be set.
SETTINGS = {k for k in all_keys() if not (k.endswith(".name") and k.count(".") == 1) and not k.startswith("model.architecture.")}

Reads = dict[str, set[str]]


def traced(config: TrainConfig, reads: Reads) -> TrainConfig:
    """``config`` itself, its dataclasses made to note in ``reads`` who reads which setting."""

    def watch(node: Any, prefix: str) -> None:
        names = [field.name for field in dataclasses.fields(node)]
        for name in names:
            if dataclasses.is_dataclass(getattr(node, name)):
                watch(getattr(node, name), f"{prefix}{name}.")
        cls = type(node)

        def read(self: Any, name: str) -> Any:
            if name in names:
                frame = sys._getframe(1)
                file, function = frame.f_code.co_filename, frame.f_code.co_name
                if not file.endswith(NOT_READERS) and not (file.endswith("tracking/build.py") and function == "<dictcomp>") and "omegaconf" not in file and function not in SHOWING:
                    reads.setdefault(prefix + name, set()).add(f"{Path(file).name}:{function}")
            return cls.__getattribute__(self, name)

        node.__class__ = type(cls.__name__, (cls,), {"__getattribute__": read, "__module__": cls.__module__})

    watch(config, "")
    return config


def traced_run(reads: Reads, folder: Path, *words: str) -> None:
    """One run as a worker makes it, on a traced config."""
    from twinkle_research.distributed.runtime import Runtime
    from twinkle_research.trainer.run import run
    from twinkle_research.trainer.rundir import RunFolder

    cfg = compose(["backend.device=cpu", "data.max_length=256", f"run_dir={folder}", *words])
    config = validate(cfg)
    place = RunFolder(folder, config.eval_only)
    place.create()
    save_config(cfg, place.own)
    traced(config, reads)
    runtime = Runtime.start(config.launch, config.backend.device, WorldInfo("plain"))
    run(config, runtime, place)


@pytest.fixture(scope="module")
def reads(tmp_path_factory: pytest.TempPathFactory) -> Reads:
    found: Reads = {}
    folder = tmp_path_factory.mktemp("traced")
    rows = folder / "rows.jsonl"
    rows.write_text('{"prompt": "2 + 2 =", "completion": " 4"}\n' * 6)
    short = ["model=tiny", "trainer.max_steps=2", "trainer.batch_size=2", "data.limit=6"]
    few = "trainer.sample_max_tokens=2"
    own = ["data=jsonl", f"data.path={rows}", f"data.eval_path={rows}", "trainer.epochs=1", "data.preview=1"]
    traced_run(found, folder / "a", *short, few, "data.eval_rows=2", "trainer.eval_every=1", "checkpoint.every=1")
    traced_run(found, folder / "b", *short, *own, "adapter=none", "optimizer=muon", "scheduler=wsd", "scheduler.decay_steps=1")
    traced_run(found, folder / "c", *short, few, "optimizer=sgd", "scheduler=cosine", "tracking.wandb.mode=offline")
    return found


def test_every_setting_is_read(reads: Reads) -> None:
    assert len(SETTINGS) > 80
    unread = sorted(SETTINGS - set(reads))
    assert not unread
