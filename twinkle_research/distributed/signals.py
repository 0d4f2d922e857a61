"""Requests to stop. The first SIGINT, SIGTERM or SIGUSR1 asks the run to save and leave; a second one leaves at once.

Python runs signal handlers between two bytecodes of the main thread, which may sit inside one long operation of
torch. So a thread listens on the wakeup pipe that the C handler writes to, and counts there.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from twinkle_research.errors import EXIT_INTERRUPTED, EXIT_STOPPED

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

# srun and torchrun deliver one request to a process up to twice (directly and through a parent).
LAUNCHER_ECHO_SECONDS = 2.0


class StopSignals:
    """Counts stop signals while it is installed (main thread only).

    ``echo_seconds``: signals so soon after the first are the same request. ``on_second``: called, in another thread,
    just before the process leaves with 130; ``leave_on_second=False`` only counts (for a parent that acts itself).

    ``lasting``: others may be installed within it (a job within its sweep). An inner one knows of the requests that the outer
    one has, and leaves its own to it at its end.
    """

    _installed: ClassVar[StopSignals | None] = None

    def __init__(
        self,
        *,
        echo_seconds: float = 0.0,
        leave_on_second: bool = True,
        on_second: Callable[[], None] | None = None,
        lasting: bool = False,
    ) -> None:
        self.lasting = lasting
        self.echo_seconds = echo_seconds
        self.leave_on_second = leave_on_second
        self.on_second = on_second
        self.count = 0
        self.last = 0
        self._first_at = 0.0
        self._leave_on_first = False
        self._replaced: dict[int, Any] = {}
        self._pipe: tuple[int, int] = (-1, -1)
        self._old_wakeup = -1
        self._outer: StopSignals | None = None
        self._thread: threading.Thread | None = None
        self._of_outer = 0

    @property
    def requested(self) -> bool:
        return self.count > 0

    def install(self) -> None:
        """Takes over the stop signals, those included that arrived while the starting parent had them blocked."""
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        self._old_wakeup = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        # An empty handler: what counts is that its C part feeds the pipe.
        self._replaced = {number: signal.signal(number, lambda *_: None) for number in STOP_SIGNALS}
        for number in STOP_SIGNALS:
            signal.siginterrupt(number, False)  # system calls of C libraries go on
        present, StopSignals._installed = StopSignals._installed, self
        self._outer = present if present is not None and present.lasting else None
        if self._outer is not None and self._outer.requested:
            self.count, self.last, self._first_at = 1, self._outer.last, self._outer._first_at
            self._of_outer = 1
        self._thread = threading.Thread(target=self._listen, args=(self._pipe[0],), name="stop-signals", daemon=True)
        self._thread.start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)

    def restore(self) -> None:
        for number, handler in self._replaced.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_wakeup)
        StopSignals._installed = self._outer
        os.close(self._pipe[1])  # ends the thread, which closes the other end
        if self._outer is not None:
            for number in STOP_SIGNALS:
                signal.siginterrupt(number, False)
            self._thread.join(1.0)  # it counts what has come until now
            if self.count > self._of_outer:
                self._outer._first_at = self._outer._first_at or self._first_at
                self._outer.last = self.last
                self._outer.count += self.count - self._of_outer

    def ignore(self) -> None:
        """The run is over and recorded: a signal now must not change its exit code."""
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def __enter__(self) -> StopSignals:
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def forget_in_child(self) -> None:
        """A forked helper (loading data) shares the pipe and must not count for its parent; Ctrl-C reaches it too."""
        signal.set_wakeup_fd(-1)
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.SIG_IGN)

    @contextmanager
    def leaving_on_first(self) -> Iterator[None]:
        """While there is nothing to save yet (waiting for the other ranks), a first signal leaves at once with 75; not within
        an outer one, which has its own to record."""
        if self._outer is not None:
            yield
            return
        self._leave_on_first = True
        if self.requested:
            os._exit(EXIT_STOPPED)
        try:
            yield
        finally:
            self._leave_on_first = False

    def _listen(self, pipe: int) -> None:
        while data := os.read(pipe, 64):
            for number in data:
                if number in STOP_SIGNALS:
                    self._received(number)
        os.close(pipe)

    def _received(self, number: int) -> None:
        now = time.monotonic()
        if self.count and now - self._first_at < self.echo_seconds:
            return
        if not self.count:
            self._first_at = now
        self.last = number
        self.count += 1
        if self._leave_on_first:
            os._exit(EXIT_STOPPED)
        if self.count >= 2 and self.leave_on_second:
            self._leave()

    def _leave(self) -> None:
        # on_second may write to a disk that hangs: leave in any case.
        timer = threading.Timer(1.0, os._exit, [EXIT_INTERRUPTED])
        timer.daemon = True
        timer.start()
        try:
            if self.on_second is not None:
                self.on_second()
        finally:
            os._exit(EXIT_INTERRUPTED)


@contextmanager
def blocked() -> Iterator[None]:
    """Children started inside inherit blocked stop signals: one that arrives before they listen waits for them."""
    old = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _after_fork() -> None:
    if StopSignals._installed is not None:
        StopSignals._installed.forget_in_child()
        StopSignals._installed = None


os.register_at_fork(after_in_child=_after_fork)
