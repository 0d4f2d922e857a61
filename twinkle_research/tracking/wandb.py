"""Weights & Biases: the real client, in a thread of its own, so that no server can stop or slow the training.

Steps are W&B's through ``define_metric("*", step_metric="step")``, never its own counter, so that a resumed run can
log again. What a run sends after a resume: (1) rows before the checkpoint that W&B does not have (a kill loses the
last second of them, online up to 15 s); (2) rows after it, but for those that it already has with the same values.
Whether it has a step is read from the ``.wandb`` files in the run folder (offline) or from the server's summary.

Sample tables have a thread of their own: before each, the client asks the server something and waits for the answer.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinkle_research.tracking.credentials import base_url, user_settings_file
from twinkle_research.tracking.files import METRICS, SAMPLES, TIMING, read_rows, write_atomic
from twinkle_research.tracking.wandb_log import recorded_rows

if TYPE_CHECKING:
    import wandb

FLUSH_SECONDS = 1.0  # the default of 15 s would lose that much at a kill
PROBE_SECONDS = 5.0
INIT_SECONDS = 30.0
FINISH_SECONDS = 30.0  # how long the end of a run may wait for W&B
EXIT_CODES = {"finished": 0, "failed": 1, "stopped": 75}
RUN_ID_FILE = "run_id"


@dataclass(frozen=True)
class WandbIdentity:
    """What a run is called at W&B."""

    project: str
    entity: str | None
    name: str
    group: str | None
    tags: list[str] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)


def set_environment(folder: Path) -> None:
    """All that wandb writes goes into the run folder, nothing into the home folder. What the user has set wins."""
    os.environ.setdefault("WANDB_CACHE_DIR", str(folder / "cache"))
    os.environ.setdefault("WANDB_DATA_DIR", str(folder / "data"))
    os.environ.setdefault("WANDB_ARTIFACT_DIR", str(folder / "artifacts"))
    if not user_settings_file().exists():  # it holds the address of a self-hosted server
        os.environ.setdefault("WANDB_CONFIG_DIR", str(folder / "config"))
    os.environ.setdefault("WANDB_SILENT", "true")  # its lines would mix with the progress bar; ours say the same
    # Its own error reports go to an address that a closed network lacks, and the process then ends 12 s late (measured).
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")


def choose_run_id(folder: Path, from_checkpoint: str | None) -> str:
    """The id of this run folder: the checkpoint's, else that of an earlier attempt, else a new one; kept in a file."""
    path = folder / RUN_ID_FILE
    known = path.read_text(encoding="utf-8").strip() if path.exists() else None
    run_id = from_checkpoint or known or secrets.token_hex(6)
    if run_id != known:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(path, f"{run_id}\n".encode())
    return run_id


def unreachable(url: str) -> str | None:
    """Why ``url`` cannot be reached, or None. Any answer counts as reached; proxies of the environment are used."""
    try:
        urllib.request.urlopen(url, timeout=PROBE_SECONDS).close()
    except urllib.error.HTTPError:
        return None
    except OSError as error:  # URLError and timeouts included
        return str(getattr(error, "reason", error))
    return None


class WandbTracker:
    """Sends the rows of one run folder to W&B, or records them offline.

    ``log_step`` and ``log_samples`` only put the row into a queue. Whatever fails at W&B is told once through
    ``message``; the rows are in metrics.jsonl anyway, and a later resume sends what is missing.
    """

    def __init__(
        self,
        identity: WandbIdentity,
        folder: Path,
        *,
        online: bool,
        run_id: str,
        resume_step: int,
        message: Callable[[str], None],
    ):
        set_environment(folder / "wandb")
        self.identity = identity
        self.folder = folder
        self.online = online
        self.run_id = run_id
        self.resume_step = resume_step
        self.message = message
        self._server_step: int | None = None
        self._given_up = False
        self._ending: str | None = None  # how the run has ended, once that is known
        self._queue: queue.SimpleQueue[tuple] = queue.SimpleQueue()
        # What is before the checkpoint is read now: these files grow from here on.
        self._before = self._rows_before() if resume_step else []
        self._thread = threading.Thread(target=self._guarded, name="wandb", daemon=True)
        self._thread.start()

    def log_step(self, row: dict[str, Any], timing: dict[str, Any]) -> None:
        if self._thread.is_alive():  # else W&B has failed, and nobody would take the row out again
            self._queue.put(("step", row["step"], row, timing))

    def log_samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        if self._thread.is_alive():
            self._queue.put(("samples", step, rows))

    def flush(self) -> None:
        """Nothing to do: a resume finds out by itself what W&B lacks."""

    def finish(self, state: str) -> None:
        """Waits for W&B, but never longer than the constants above add up to."""
        self._queue.put(("finish", state))
        self._thread.join(PROBE_SECONDS + INIT_SECONDS + 2 * FINISH_SECONDS)
        if self._thread.is_alive():
            self._given_up = True
            self.message(f"W&B did not finish in time; what it has is in {self.folder / 'wandb'}, all rows are in {METRICS}")

    # --- in the thread ------------------------------------------------------------------------------------------

    def _guarded(self) -> None:
        try:
            try:
                self._work()
            except ConnectionError:
                self._close_with_another()
        except Exception as error:  # a third party's service must never end a training run
            if not self._given_up:
                self.message(
                    f"W&B failed and is off for the rest of this run ({type(error).__name__}: {first_line(error)}); "
                    f"training goes on, and all rows are in {METRICS}"
                )

    def _work(self) -> None:
        run = self._start()
        recorded = recorded_rows(self.folder / "wandb", self.run_id, after=self.resume_step)
        arrived = self._arrived(recorded)
        tables = TableSender(run, self.message)
        self._send_missing(run, tables, arrived)
        while True:
            kind, *content = self._queue.get()
            if kind == "finish":
                self._ending = content[0]
                break
            step, content = content[0], content[1:]
            known = recorded.get(step, {}) if step in arrived else None  # what W&B has of this step
            if kind == "samples" and (known is None or (known and "samples._type" not in known)):
                tables.put(step, content[0])
            if kind == "step" and (known is None or (known and not same_values(content[0], known))):
                log_values(run, content[0] | content[1])
        tables.finish()
        self._end(run, self._ending)

    def _close_with_another(self) -> None:
        """W&B's own process is gone: a scheduler that ends a job sends SIGTERM to all its processes, and that one leaves at once.
        When the run ends, another one takes what W&B lacks, and is told how it ended."""
        import wandb

        while self._ending is None:
            kind, *content = self._queue.get()
            if kind == "finish":
                self._ending = content[0]
        with contextlib.suppress(ConnectionError):
            wandb.teardown()
        self.resume_step = sys.maxsize
        self._before = self._rows_before()
        run = self._start()
        tables = TableSender(run, self.message)
        self._send_missing(run, tables, self._arrived(recorded_rows(self.folder / "wandb", self.run_id, after=self.resume_step)))
        tables.finish()
        self._end(run, self._ending)

    def _start(self) -> wandb.Run:
        import wandb

        if self.online:
            reason = unreachable(base_url())
            if reason is None:
                try:
                    run = self._init("online")
                    self.message(f"W&B: {run.url}")
                    return run
                except (wandb.errors.Error, TimeoutError) as error:
                    reason = first_line(error)
                    wandb.teardown()
            self.message(
                f"W&B: {base_url()} cannot be used ({reason}); recording offline, training goes on. Later: {self._sync_command()}"
            )
            self.online = False
        return self._init("offline")

    def _init(self, mode: str) -> wandb.Run:
        import wandb

        try:
            return self._open(mode)
        except (ConnectionError, TimeoutError, wandb.errors.CommError, wandb.errors.UsageError):
            raise
        except Exception:  # of the kinds that wandb does not name: its own process was ended, as below, while it started
            wandb.teardown()
            return self._open(mode)

    def _open(self, mode: str) -> wandb.Run:
        import wandb

        settings = wandb.Settings(
            x_transaction_log_flush_interval=FLUSH_SECONDS,
            init_timeout=INIT_SECONDS,
            finish_timeout=FINISH_SECONDS,
            finish_timeout_raises=True,
            console="off",  # train.log has it
            silent=True,
            disable_job_creation=True,
        )
        identity = self.identity
        run = wandb.init(
            mode=mode,
            project=identity.project,
            entity=identity.entity,
            name=identity.name,
            group=identity.group,
            tags=identity.tags,
            id=self.run_id,
            resume="allow",
            reinit="create_new",  # also beside a run whose process is gone
            dir=str(self.folder),
            settings=settings,
        )
        if run.resumed:  # read before define_metric, which empties this entry
            self._server_step = (run.summary.get("step") or {}).get("max")
        run.config.update(identity.config, allow_val_change=True)
        run.define_metric("step", summary="max")  # tables may come after the metrics of later steps
        run.define_metric("*", step_metric="step")
        return run

    def _arrived(self, recorded: dict[int, dict]) -> range | set[int]:
        """The steps that need not be sent again."""
        if not self.online:
            return set(recorded)
        return range(0 if self._server_step is None else int(self._server_step) + 1)

    def _rows_before(self) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
        """(values, samples) of each step up to the checkpoint, as the files have them."""
        timing = {row["step"]: row for row in read_rows(self.folder / TIMING)}
        samples: dict[int, list] = {}
        for row in read_rows(self.folder / SAMPLES):
            samples.setdefault(row["step"], []).append(row)
        rows = {row["step"]: row for row in read_rows(self.folder / METRICS) if row["step"] <= self.resume_step}
        return [({**row, **timing.get(step, {})}, samples.get(step, [])) for step, row in rows.items()]

    def _send_missing(self, run: wandb.Run, tables: TableSender, arrived: range | set[int]) -> None:
        missing = [(values, samples) for values, samples in self._before if values["step"] not in arrived]
        for values, samples in missing:
            log_values(run, values)
            if samples:
                tables.put(values["step"], samples)
        if missing:
            self.message(f"W&B: sent {len(missing)} earlier steps that it did not have")
        self._before = []

    def _end(self, run: wandb.Run, state: str) -> None:
        if state == "stopped":
            run.mark_preempting()
        try:
            run.finish(exit_code=EXIT_CODES[state])
        except TimeoutError:
            self.message(f"W&B did not take everything in time. The rest: {self._sync_command()}")
            return
        if not self.online:
            self.message(f"W&B recorded offline. To send it: {self._sync_command()}")

    def _sync_command(self) -> str:
        return f"cd {self.folder.resolve()} && wandb sync --yes"


class TableSender:
    """Logs answers of the model as tables, one after the other, in a thread that may wait for the server."""

    def __init__(self, run: wandb.Run, message: Callable[[str], None]):
        self.run = run
        self.message = message
        self._given_up = False
        self._queue: queue.SimpleQueue[tuple[int, list] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="wandb-tables", daemon=True)
        self._thread.start()

    def put(self, step: int, rows: list[dict[str, Any]]) -> None:
        self._queue.put((step, rows))

    def finish(self) -> None:
        self._queue.put(None)
        self._thread.join(FINISH_SECONDS)
        if self._thread.is_alive():
            self._given_up = True
            self.message(f"W&B did not take all sample tables in time; they are in {SAMPLES}")

    def _work(self) -> None:
        import wandb

        while (item := self._queue.get()) is not None:
            step, rows = item
            columns = list(dict.fromkeys(name for row in rows for name in row if name != "step"))
            cells = [[table_cell(row.get(name)) for name in columns] for row in rows]
            try:
                log_values(self.run, {"step": step, "samples": wandb.Table(columns=columns, data=cells)})
            except Exception as error:  # as above
                if not self._given_up:
                    self.message(f"W&B took no sample table ({type(error).__name__}: {first_line(error)}); see {SAMPLES}")
                return


def log_values(run: wandb.Run, values: dict[str, Any]) -> None:
    """One row of W&B, complete at once; what is not known is left out."""
    run.log({name: value for name, value in values.items() if value is not None}, commit=True)


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]


def table_cell(value: Any) -> str | int | float | bool | None:
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


def same_values(metrics: dict[str, Any], recorded: dict[str, Any]) -> bool:
    """Whether ``recorded`` has all metrics with these values; null, NaN and a missing one are the same."""

    def known(value: Any) -> Any:
        return None if isinstance(value, float) and value != value else value

    return all(known(recorded.get(name)) == known(value) for name, value in metrics.items())
