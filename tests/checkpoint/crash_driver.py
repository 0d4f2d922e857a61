"""Run as a script by test_checkpoint_crash.py: kills a save at every point at which it touches the disk.

    python crash_driver.py <folder> kill|power-loss <scenario>...

For each point a forked child saves, with the operating system's calls wrapped, and ends itself by SIGKILL at that
point (and in the middle of each write). "power-loss" also undoes what had not been flushed to the disk: contents of
files, names in folders and renames. Prints one JSON object: for each scenario how many points there were, which save
was found after each, and what went wrong.
"""

import builtins
import io
import json
import logging
import os
import shutil
import signal
import sys
from pathlib import Path

import torch

from twinkle_research.checkpoint.config import CheckpointConfig
from twinkle_research.checkpoint.format import CheckpointReader, TensorSpec
from twinkle_research.checkpoint.manager import CheckpointManager
from twinkle_research.distributed.runtime import Runtime
from twinkle_research.trainer.rundir import RunFolder


class Weights:
    """What a save needs of a model: two streams of tensors that tell which save wrote them."""

    backend = "transformers"
    layout = {"world_size": 1, "sharding": "none"}

    def __init__(self, value: float) -> None:
        self.tensors = {f"layer.{i}.weight": torch.full((8,), value + i) for i in range(2)}

    def save_state(self, writer, save_optimizer=True):
        specs = [TensorSpec.of(name, tensor) for name, tensor in self.tensors.items()]
        writer.add_tensors("model", specs, self.tensors.items())
        writer.add_tensors("optimizer", specs, self.tensors.items(), stem="optimizer", max_shard_bytes=32)
        writer.add_files("model", lambda path: (path / "config.json").write_text("{}"))
        return {"cur_step": int(self.tensors["layer.0.weight"][0])}


def manager(run: Path, keep: int) -> CheckpointManager:
    return CheckpointManager(RunFolder(run), CheckpointConfig(every=2, keep=keep, keep_best=False), Runtime())


def save(run: Path, step: int, value: float, keep: int = 2) -> None:
    manager(run, keep).save(step, Weights(value), {"step": step, "value": value})


def content(path: Path) -> float:
    """The value that was saved, checked to be the same in every part."""
    reader = CheckpointReader(path)
    reader.verify("full")
    value = reader.json("trainer_state.json")["value"]
    for part in ("model", "optimizer"):
        tensors = reader.tensors(part)
        assert all(torch.equal(tensors[f"layer.{i}.weight"], torch.full((8,), value + i)) for i in range(2)), path
    assert (path / "model" / "config.json").read_text() == "{}"
    return value


# --- the disk, with a counter ---------------------------------------------------------------------------------------


class Disk:
    """Wraps the calls that change a disk. Kills this process at the ``fatal``-th point: before each call, in the
    middle of each write, and at the end."""

    def __init__(self, root: Path, fatal: int, power_loss: bool) -> None:
        self.root, self.fatal, self.power_loss = str(root), fatal, power_loss
        self.points = 0
        self.unsynced_data: set[int] = set()  # inodes
        self.unsynced_names: list[tuple[str, tuple]] = []  # (folder, how to undo)
        self.real = {name: getattr(os, name) for name in ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir")}
        self.real_open = builtins.open

    def install(self) -> None:
        for name in self.real:
            setattr(os, name, getattr(self, name))
        builtins.open = io.open = self.open  # pathlib uses io.open

    def point(self) -> None:
        self.points += 1
        if self.points == self.fatal:
            if self.power_loss:
                self.lose()
            os.kill(os.getpid(), signal.SIGKILL)

    def lose(self) -> None:
        for _, (kind, *args) in reversed(self.unsynced_names):
            if kind == "rename":
                self.real["rename"](args[1], args[0])
                if args[2] is not None:
                    with self.real_open(args[1], "wb") as file:
                        file.write(args[2])
            elif kind == "create" and Path(args[0]).is_dir():
                shutil.rmtree(args[0])
            elif kind == "create":
                Path(args[0]).unlink(missing_ok=True)
        for folder, _, names in os.walk(self.root):
            for name in names:
                path = os.path.join(folder, name)
                if os.stat(path).st_ino in self.unsynced_data:
                    os.truncate(path, os.path.getsize(path) // 2)

    def name_changed(self, path: str, undo: tuple) -> None:
        self.unsynced_names.append((os.path.dirname(path), undo))

    @staticmethod
    def moved(entry, source: str, target: str):
        """What is not flushed yet in a folder that is renamed now lies under its new name."""

        def new(value):
            inside = isinstance(value, str) and (value == source or value.startswith(source + "/"))
            return target + value[len(source) :] if inside else value

        folder, (kind, *args) = entry
        if folder == os.path.dirname(source):
            return entry
        return new(folder), (kind, *map(new, args))

    def open(self, file, mode="r", *args, **kwargs):
        if not set(mode) & set("wxa+"):
            return self.real_open(file, mode, *args, **kwargs)
        self.point()
        stream = self.real_open(file, mode, *args, **kwargs)
        self.name_changed(os.fspath(file), ("create", os.fspath(file)))
        return Stream(self, stream)

    def fsync(self, descriptor) -> None:
        self.point()
        self.real["fsync"](descriptor)
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        self.unsynced_data.discard(os.fstat(descriptor).st_ino)
        self.unsynced_names = [entry for entry in self.unsynced_names if entry[0] != path]

    def rename(self, source, target, **kwargs) -> None:
        self.point()
        source, target = os.fspath(source), os.fspath(target)
        old = Path(target).read_bytes() if os.path.isfile(target) else None
        self.real["rename"](source, target)
        self.unsynced_names = [self.moved(entry, source, target) for entry in self.unsynced_names]
        self.name_changed(target, ("rename", source, target, old))

    replace = rename

    def mkdir(self, path, *args, **kwargs) -> None:
        self.point()
        self.real["mkdir"](path, *args, **kwargs)
        self.name_changed(os.fspath(path), ("create", os.fspath(path)))

    def unlink(self, path, **kwargs) -> None:
        self.point()
        self.real["unlink"](path, **kwargs)

    def rmdir(self, path, **kwargs) -> None:
        self.point()
        self.real["rmdir"](path, **kwargs)


class Stream:
    """A file that can be cut in the middle of a write."""

    def __init__(self, disk: Disk, stream) -> None:
        self.disk, self.stream = disk, stream

    def write(self, data):
        self.disk.unsynced_data.add(os.fstat(self.stream.fileno()).st_ino)
        self.disk.point()
        half = len(data) // 2
        count = self.stream.write(data[:half])
        if count == half:
            self.stream.flush()
            self.disk.point()
            count += self.stream.write(data[half:])
        return count

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.stream.close()


# --- scenarios ------------------------------------------------------------------------------------------------------


def first(run: Path) -> tuple[float | None, int, int]:
    run.mkdir(parents=True)
    return None, 2, 2


def second(run: Path) -> tuple[float | None, int, int]:
    save(run, 2, 100.0)
    return 100.0, 4, 1  # keep=1: the save deletes step 2


def repeated(run: Path) -> tuple[float | None, int, int]:
    save(run, 2, 100.0)
    save(run, 4, 200.0)
    return 200.0, 4, 2  # the same step again


def only_one_repeated(run: Path) -> tuple[float | None, int, int]:
    save(run, 4, 200.0)
    return 200.0, 4, 1


def after_a_crash(run: Path) -> tuple[float | None, int, int]:
    """A crash has left the replaced and the half-written folder, a deletion and a pointer behind."""
    save(run, 4, 200.0)
    root = run / "checkpoints"
    shutil.copytree(root / "step-000004", root / "step-000004.tmp")
    (root / "step-000004.tmp" / "manifest.json").unlink()
    (root / "step-000004").rename(root / "step-000004.replaced")
    shutil.copytree(root / "step-000004.tmp", root / "step-000002.trash")
    (root / "latest.new").write_text("step-0")
    return 200.0, 4, 1


SCENARIOS = {f.__name__: f for f in (first, second, repeated, only_one_repeated, after_a_crash)}


def crashed_child(run: Path, step: int, keep: int, fatal: int, power_loss: bool) -> bool:
    """Whether the save was killed (False: there were fewer points, and it went through)."""
    child = os.fork()
    if child == 0:
        disk = Disk(run, fatal, power_loss)
        disk.install()
        save(run, step, 300.0, keep)
        disk.point()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, f"the save failed by itself at point {fatal}"
    return os.WIFSIGNALED(status)


def check(run: Path, step: int, keep: int, before: float | None) -> str:
    """After the crash the old or the new checkpoint is whole, and the next save goes through and leaves nothing over."""
    newest = manager(run, keep).latest()
    found = None if newest is None else content(newest)
    assert found in (before, 300.0), f"latest() has {found}"
    pointer = run / "checkpoints" / "latest"
    if pointer.exists():
        named = pointer.read_text().strip()
        folder = run / "checkpoints" / named
        assert named in ("step-000002", "step-000004") and (not folder.exists() or content(folder)), named
    save(run, step, 400.0, keep)
    newest = manager(run, keep).latest()
    assert content(newest) == 400.0
    names = sorted(p.name for p in (run / "checkpoints").iterdir())
    assert all(not name.endswith((".tmp", ".replaced", ".trash", ".new")) for name in names), names
    assert names.count("latest") == 1 and len(names) <= keep + 1, names
    return "old" if found == before else "new"


def crash_everywhere(base: Path, scenario: str, power_loss: bool) -> dict:
    failures, outcomes = [], []
    template = base / "template"
    before, step, keep = SCENARIOS[scenario](template)
    point = 0
    killed = True
    while killed:
        point += 1
        run = base / f"run-{point}"
        shutil.copytree(template, run)
        killed = crashed_child(run, step, keep, point, power_loss)
        if killed:
            try:
                outcomes.append(check(run, step, keep, before))
            except Exception as error:
                failures.append(f"point {point}: {type(error).__name__}: {error}")
        shutil.rmtree(run)
    return {"points": point - 1, "failures": failures, "outcomes": outcomes}


def main() -> None:
    base, mode, *scenarios = sys.argv[1:]
    logging.disable(logging.WARNING)
    os.fsync = lambda descriptor: None  # Disk keeps the books on what is flushed; waiting for the real disk shows nothing
    results = {s: crash_everywhere(Path(base).resolve() / s, s, mode == "power-loss") for s in scenarios}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
