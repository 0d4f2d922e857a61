"""TensorBoard event files under ``<run_dir>/tensorboard``, by TensorBoard's own writer: it costs no import of torch."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

FLUSH_SECONDS = 10
QUEUE_SIZE = 1000  # the default of 10 makes the training wait for the writer's thread


class TensorBoardTracker:
    """Writes each number of a row as a scalar at the row's step, and samples as text.

    A resumed run starts a new file with a session mark: TensorBoard then leaves out what older files have
    after the checkpoint.
    """

    def __init__(self, folder: Path, resume_step: int):
        self.folder = folder
        self.resume_step = resume_step
        self._writer = None

    def log_step(self, row: dict[str, Any], timing: dict[str, Any]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        numbers = {name: value for name, value in (row | timing).items() if isinstance(value, int | float) and name != "step"}
        values = [Summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        self._add(row["step"], summary=Summary(value=values))

    def log_samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        from tensorboard.plugins.text.summary import text_pb

        for number, row in enumerate(rows):
            text = f"{indented(row['prompt'])}\n\nanswer:\n\n{indented(row['completion'])}"
            self._add(step, summary=text_pb(f"samples/{number}", text))

    def flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def finish(self, state: str) -> None:
        if self._writer is not None:
            self._writer.close()

    def _add(self, step: int, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        if self._writer is None:
            self._writer = self._open()
        self._writer.add_event(Event(wall_time=time.time(), step=step, **content))

    def _open(self) -> Any:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        again = self.folder.exists()
        if again:
            self._wait_for_a_later_name()
        writer = EventFileWriter(str(self.folder), max_queue_size=QUEUE_SIZE, flush_secs=FLUSH_SECONDS)
        if again:  # also after a kill before the first checkpoint, when all is written anew
            first = self.resume_step + 1 if self.resume_step else 0
            writer.add_event(Event(wall_time=time.time(), step=first, session_log=SessionLog(status=SessionLog.START)))
        return writer

    def _wait_for_a_later_name(self) -> None:
        """TensorBoard reads files in the order of their names, which begin with the second they were made in."""
        stamps = [int(path.name.split(".")[3]) for path in self.folder.glob("events.out.tfevents.*")]
        time.sleep(min(1.0, max(0.0, max(stamps, default=0) + 1 - time.time())))


def indented(text: str) -> str:
    """As a Markdown code block, so that TensorBoard shows the text as it is."""
    return "\n".join(f"    {line}" for line in text.splitlines())
