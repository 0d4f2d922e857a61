"""The checkpoints of one run: when to save and which ones stay."""

from __future__ import annotations

import hashlib
import logging
import math
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinkle_research.checkpoint.config import CheckpointConfig, CheckpointFormat
from twinkle_research.checkpoint.files import remove_folder, write_pointer
from twinkle_research.checkpoint.folder import recover
from twinkle_research.checkpoint.format import CheckpointReader, CheckpointWriter, publish_latest
from twinkle_research.checkpoint.manifest import Manifest, manifests
from twinkle_research.checkpoint.names import BEST, RESERVED_SUFFIXES, TRAINER_STATE, step_name, step_of
from twinkle_research.checkpoint.newest import Level, newest_checkpoint
from twinkle_research.errors import CheckpointError

if TYPE_CHECKING:
    from twinkle_research.distributed.runtime import Runtime
    from twinkle_research.model.base import TwinkleModel
    from twinkle_research.trainer.rundir import RunFolder

__all__ = ["CheckpointManager", "newest_checkpoint"]

log = logging.getLogger(__name__)


class CheckpointManager:
    """Saves and finds the checkpoints of a run folder. To make one and ``save`` are collective. Only the main rank touches the
    disk, but for the parts of tensors that each rank writes with ``checkpoint.format=sharded``.

    Only the holder of the run's lock may save: the first save removes what a crash has left.
    """

    def __init__(self, folder: RunFolder, cfg: CheckpointConfig, runtime: Runtime) -> None:
        self.root = folder.checkpoints
        self.cfg = cfg
        self.runtime = runtime
        self.config_hash = hashlib.sha256(folder.config.read_bytes()).hexdigest() if folder.config.is_file() else ""
        self._is_sharded = cfg.format is CheckpointFormat.sharded
        # What the writing threads agree on must not come between the collectives of training.
        self._writers = runtime.apart() if self._is_sharded and cfg.background else runtime
        self._cleaned = False
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def due(self, step: int) -> bool:
        """Whether ``checkpoint.every`` asks for a checkpoint after optimizer step ``step``."""
        return self.cfg.every is not None and step % self.cfg.every == 0

    def latest(self, verify: Level = "auto") -> Path | None:
        """newest_checkpoint of this run. Not collective: the main rank asks and tells the others."""
        return newest_checkpoint(self.root, verify) if self.root.is_dir() else None

    def save(
        self, step: int, model: TwinkleModel, trainer_state: dict[str, Any], metric: float | None = None,
        files: Mapping[str, Any] | None = None,
    ) -> Path:  # fmt: skip
        """Writes ``step-NNNNNN``, then ``latest``, then deletes what retention does not keep. Collective.

        ``trainer_state.json`` gets ``trainer_state`` and, under ``model``, what ``model.save_state`` returns.
        ``metric``, to be small, says how good this step is; ``files`` are further JSON files by name. With
        ``cfg.background`` this returns once a copy of the tensors is made; an error of the writing thread is raised by the
        next ``save`` or ``wait``.
        """
        self.wait()
        if self.runtime.is_main:
            self._clean()
        with _disk_errors(self.root / step_name(step)):
            writer = self._writer(
                step_name(step),
                step=step,
                backend=model.backend,
                layout=model.layout,
                config_hash=self.config_hash,
                metric=metric if metric is not None and math.isfinite(metric) else None,
                deferred=self.cfg.background,
            )
            try:
                model_state = model.save_state(writer)
                writer.add_json(TRAINER_STATE, {**trainer_state, "model": model_state})
                for name, value in (files or {}).items():
                    writer.add_json(name, value)
            except BaseException:
                writer.abort()
                raise
        if self.cfg.background:
            if writer.is_writer or writer.is_collective:
                self._thread = threading.Thread(target=self._finish_in_background, args=(writer,), name="checkpoint")
                self._thread.start()
        else:
            self._finish(writer)
            self.runtime.barrier()
        return writer.target

    def _writer(self, name: str, **about: Any) -> CheckpointWriter:
        if not self._is_sharded:
            return CheckpointWriter(self.root, name, is_writer=self.runtime.is_main, **about)
        from twinkle_research.checkpoint.sharded import ShardedWriter

        return ShardedWriter(self.root, name, runtime=self._writers, **about)

    def wait(self) -> None:
        """Returns when nothing is being written; raises what went wrong in the background."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _finish_in_background(self, writer: CheckpointWriter) -> None:
        try:
            self._finish(writer)
        except BaseException as error:  # handed to the training thread
            self._failure = error

    def _finish(self, writer: CheckpointWriter) -> None:
        with _disk_errors(writer.target):
            writer.commit()
            if writer.is_writer:
                publish_latest(self.root, writer.target.name)
                self._retain()

    def _clean(self) -> None:
        """Removes what a crash has left of earlier saves and deletions."""
        if self._cleaned or not self.root.is_dir():
            return
        for path in sorted(self.root.iterdir()):
            for suffix in RESERVED_SUFFIXES:
                base = path.name.removesuffix(suffix)
                if path.name.endswith(suffix) and step_of(base) is not None and path.exists():
                    log.warning("removing or restoring %s, left by a run that was killed", path)
                    recover(self.root / base)
        self._cleaned = True

    def _retain(self) -> None:
        """Deletes all but the newest ``keep`` whole checkpoints and, with ``keep_best``, the one with the best metric."""
        steps = {name: m for name, m in manifests(self.root).items() if step_of(name) is not None}
        whole = {name: m for name, m in steps.items() if _is_whole(self.root / name)}
        newest = sorted(whole, key=lambda name: whole[name].sequence, reverse=True)[: self.cfg.keep]
        best = _best(whole) if self.cfg.keep_best else None
        if best is not None:
            write_pointer(self.root / BEST, best)
        else:
            (self.root / BEST).unlink(missing_ok=True)
        for name in steps:
            if name not in newest and name != best:
                remove_folder(self.root / name)


def _is_whole(path: Path) -> bool:
    try:
        return not CheckpointReader(path).problems("size")
    except CheckpointError:
        return False


def _best(whole: dict[str, Manifest]) -> str | None:
    """The checkpoint with the lowest metric, the earliest of equals."""
    measured = [(m.metric, m.sequence, name) for name, m in whole.items() if m.metric is not None]
    return min(measured)[2] if measured else None


@contextmanager
def _disk_errors(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"checkpoint {target} could not be written: {error.strerror or error} ({error.filename or 'no file named'}). "
            "Earlier checkpoints are untouched; the same command continues from the newest of them."
        ) from error
