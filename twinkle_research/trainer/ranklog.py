"""What a rank prints, kept: ``logs/rank-N.log`` for each rank and ``train.log`` for what the screen showed."""

from __future__ import annotations

import faulthandler
import logging
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from twinkle_research.trainer.rundir import RunFolder

LOGGER = logging.getLogger("twinkle_research")  # what our modules log; its level is that of the screen
_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")


class Tee:
    """A text stream that also writes whole lines to log files, as they stood when they ended.

    Progress bars redraw a line after a carriage return; only its last state is kept, without colours. When the reader
    of the stream has gone (``train.py | head``), the run goes on with the log files alone.
    """

    def __init__(self, stream: IO[str], logs: list[IO[str]]) -> None:
        self.stream = stream
        self.logs = logs
        self._line = ""

    def write(self, text: str) -> int:
        with self._reader_may_leave():
            self.stream.write(text)
        *ended, rest = (self._line + text).split("\n")
        for line in ended:
            self._keep(line)
        self._line = last_drawn(rest)
        return len(text)

    def flush(self) -> None:
        with self._reader_may_leave():
            self.stream.flush()

    @contextmanager
    def _reader_may_leave(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.stream.fileno())
            os.close(nowhere)

    def _keep(self, line: str) -> None:
        for log in self.logs:
            log.write(_ESCAPES.sub("", last_drawn(line)) + "\n")

    def finish(self) -> None:
        if _ESCAPES.sub("", self._line).strip():
            self._keep(self._line)
        self._line = ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def last_drawn(line: str) -> str:
    """What stands after the last carriage return; one at the very end only moves the cursor."""
    body = line.rstrip("\r")
    return body[body.rfind("\r") + 1 :] + line[len(body) :]


class RankLog:
    """While open, rank 0's output goes to the screen and to its logs; the other ranks' to their log alone."""

    def __init__(self, folder: RunFolder, rank: int) -> None:
        self.folder = folder
        self.rank = rank
        self.screen = sys.stderr
        self._tees: list[Tee] = []

    def __enter__(self) -> RankLog:
        self.log = self.folder.rank_log(self.rank).open("a", encoding="utf-8", buffering=1)
        self.log.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} rank {self.rank} starts\n")
        self._streams = sys.stdout, sys.stderr
        if self.rank == 0:
            self.train_log = self.folder.train_log.open("a", encoding="utf-8", buffering=1)
            self.train_log.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} start\n")
            self._tees = [Tee(stream, [self.log, self.train_log]) for stream in self._streams]
            sys.stdout, sys.stderr = self._tees
        else:
            sys.stdout = sys.stderr = self.log
        self._handler = logging.StreamHandler(sys.stderr)
        self._level = LOGGER.level
        LOGGER.addHandler(self._handler)
        LOGGER.setLevel(logging.INFO if self.rank == 0 else logging.WARNING)
        faulthandler.enable(self.log)
        return self

    def keep(self, text: str) -> None:
        """Into the log only, not onto the screen."""
        self.log.write(text.rstrip("\n") + "\n")

    def show(self, text: str) -> None:
        """Onto the screen, whichever rank this is, and into the logs."""
        if self.rank == 0:
            print(text, file=sys.stderr, flush=True)
        else:
            self.keep(text)
            print(text, file=self.screen, flush=True)

    def __exit__(self, *_: object) -> None:
        faulthandler.disable()
        LOGGER.removeHandler(self._handler)
        LOGGER.setLevel(self._level)
        for tee in self._tees:
            tee.finish()
        sys.stdout, sys.stderr = self._streams
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        if self.rank == 0:
            self.train_log.close()
        self.log.close()
