"""Processes that judge completions, for libraries that may hang or crash on what a model writes.

A process that takes too long is killed and another one started, so no expression can hang a run, whatever thread it runs in:
neither signals nor the main thread are needed here (math-verify's own time-outs need both).
"""

from __future__ import annotations

import json
import os
import queue
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from twinkle_research.errors import UserError

START_SECONDS = 180.0
_END_SECONDS = 2.0
_PROGRAM = Path(__file__).with_name("judge.py")


class Judgement(NamedTuple):
    """``score``: None where the item was not judged; ``problem`` then says why: "timeouts", "crashes" or the judge's word."""

    score: float | None
    problem: str | None = None


class WorkerPool:
    """``workers`` processes of ``judge.py``, which start at once. ``timeout``: seconds for one item."""

    def __init__(self, kind: str, workers: int = 1, timeout: float = 5.0):
        self._workers = [_Worker(kind, timeout) for _ in range(workers)]
        self._lock = threading.Lock()

    def judge(self, items: Sequence[dict[str, Any]]) -> list[Judgement]:
        """One judgement for each item, in order. Safe in any thread. Raises UserError where the processes cannot start."""
        results = [Judgement(None)] * len(items)
        waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
        for place in range(len(items)):
            waiting.put(place)
        stopped = threading.Event()

        def work(worker: _Worker) -> None:
            while not stopped.is_set():
                try:
                    place = waiting.get_nowait()
                except queue.Empty:
                    return
                results[place] = worker.judge(items[place])

        with self._lock, ThreadPoolExecutor(len(self._workers), "judge") as threads:
            try:
                for done in [threads.submit(work, worker) for worker in self._workers[: len(items)]]:
                    done.result()
            finally:
                stopped.set()
        return results

    def close(self) -> None:
        for worker in self._workers:
            worker.process.stdin.close()  # which ends those that are idle
        for worker in self._workers:
            worker.kill(after=_END_SECONDS)


class _Worker:
    def __init__(self, kind: str, timeout: float):
        self.kind = kind
        self.timeout = timeout
        self.ready = False
        self._start()

    def judge(self, item: dict[str, Any]) -> Judgement:
        if self.process.poll() is not None:
            self.kill()
            self._start()
        if not self.ready:
            self._await_ready()
        try:
            self.process.stdin.write(json.dumps(item).encode() + b"\n")
            line = self._line(self.timeout)
        except BrokenPipeError:
            line = b""
        if line is None or not line.endswith(b"\n"):
            self.kill()
            return Judgement(None, "timeouts" if line is None else "crashes")
        answer = json.loads(line)
        return Judgement(answer.get("score"), answer.get("problem"))

    def kill(self, after: float = 0.0) -> None:
        """Ends the process; it has ``after`` seconds to do so by itself."""
        try:
            self.process.wait(after)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()
        self.messages.close()

    def _start(self) -> None:
        self.ready = False
        self.messages = tempfile.TemporaryFile()  # noqa: SIM115 (closed by kill)
        # -P: the folder of the program, which is a package's, is no place to import from.
        words = [sys.executable, "-P", str(_PROGRAM), self.kind, str(self.timeout)]
        self.process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.messages,
            bufsize=0,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"},
        )
        self._buffer = b""
        self._poll = select.poll()  # select() itself cannot wait for files with a number above 1023
        self._poll.register(self.process.stdout, select.POLLIN)

    def _await_ready(self) -> None:
        line = self._line(START_SECONDS)
        if line is not None and line.endswith(b"\n"):
            self.ready = True
            return
        self.messages.seek(0)
        said = self.messages.read().decode(errors="replace").strip().splitlines()
        why = f"did not start within {START_SECONDS:g} s" if line is None else f"ended at its start: {said[-1] if said else ''}"
        self.kill()
        raise UserError(f"reward={self.kind}: the process that judges {why}")

    def _line(self, seconds: float) -> bytes | None:
        """The next line; None after ``seconds``, a part of a line where the process has ended."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not self._poll.poll(1000 * left):
                return None
            read = os.read(self.process.stdout.fileno(), 65536)
            if not read:
                return self._buffer
            self._buffer += read
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line + b"\n"
