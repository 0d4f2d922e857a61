"""What a person sees: plain lines, the bar in a real terminal, messages and logs above it, never two lines in one."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import subprocess
import sys
import threading
import time

import pytest
from tracked_run import ROOT, train

from twinkle_research.tracking.build import Tracker
from twinkle_research.tracking.config import Progress
from twinkle_research.tracking.progress import Eta, PlainProgress, QuietProgress, build_progress, format_duration

ROW = {"step": 12, "loss": 1.23449, "lr": 5e-4, "tokens": 100}
LINE = re.compile(r"step \d+/\d+(  eval/loss -?\d+\.\d{3}|  loss -?\d+\.\d{3}|  lr \S+|  [\d,]+ tok/s|  eta \d+:\d\d:\d\d)*")


def test_the_plain_line():
    out = io.StringIO()
    PlainProgress(25, 1, out).log_step(ROW, {"step_seconds": 70 / 13, "tokens_per_second": 1234.4})
    assert out.getvalue() == "step 12/25  loss 1.234  lr 5.0e-04  1,234 tok/s  eta 0:01:10\n"


def test_log_every_keeps_evaluations_and_the_last_step():
    out = io.StringIO()
    train(Tracker(None, [], PlainProgress(25, 10, out)), 1, 25, eval_every=7)
    shown = [int(line.split("/")[0].split()[1]) for line in out.getvalue().splitlines()]
    assert shown == [7, 10, 14, 20, 21, 25]
    assert all(LINE.fullmatch(line) for line in out.getvalue().splitlines())


def test_none_shows_messages_only():
    out = io.StringIO()
    progress = QuietProgress(5, 1, out)
    train(Tracker(None, [], progress), 1, 5)
    progress.message("W&B: offline")
    assert out.getvalue() == "W&B: offline\n"


@pytest.mark.parametrize("row", [{"step": 0, "eval/loss": 3.5}, {"step": 1, "loss": None, "lr": 0.0}, {"step": 2}])
def test_missing_values_are_left_out(row):
    out = io.StringIO()
    PlainProgress(25, 1, out).log_step(row, {"step": row["step"]})
    assert LINE.fullmatch(out.getvalue().strip())


def test_durations():
    assert [format_duration(s) for s in (0, 59.6, 3599, 90061, -1)] == ["0:00:00", "0:01:00", "0:59:59", "25:01:01", "0:00:00"]


def test_eta_follows_the_recent_steps():
    eta = Eta(window=3)
    assert eta.update(1, 10, None, 100.0) is None and Eta().update(1, 10, 2.0, 0.0) == 18.0
    eta.update(2, 10, None, 110.0)
    for step, now in ((3, 111.0), (4, 112.0), (5, 113.0)):
        left = eta.update(step, 10, None, now)
    assert left == 5.0  # the slow first step is forgotten


def test_lines_of_many_threads_stay_whole():
    out = io.StringIO()
    progress = PlainProgress(1000, 1, out)
    threads = [threading.Thread(target=lambda n=n: [progress.message(f"<{n}>" * 50) for _ in range(200)]) for n in range(4)]
    for thread in threads:
        thread.start()
    train(Tracker(None, [], progress), 1, 300)
    for thread in threads:
        thread.join()
    lines = out.getvalue().splitlines()
    assert len(lines) == 1100
    assert all(LINE.fullmatch(line) or re.fullmatch(r"(<\d>)\1{49}", line) for line in lines)


def test_auto_is_plain_in_a_file():
    assert type(build_progress(Progress.auto, 10, 1)) is PlainProgress


# --- a real terminal --------------------------------------------------------------------------------------------------

SCRIPT = """
import logging, sys, time, warnings
from tracked_run import train
from twinkle_research.tracking.build import Tracker
from twinkle_research.tracking.config import Progress
from twinkle_research.tracking.progress import build_progress
handler = logging.StreamHandler()      # made before the bar, as libraries do
logging.getLogger("library").addHandler(handler)
progress = build_progress(Progress.auto, 30, 1)
tracker = Tracker(None, [], progress)
tracker.message("MESSAGE before the bar")
for step in range(1, 31):
    train(tracker, step, step)
    if step == 10:
        tracker.message("MESSAGE [red]not markup[/red] " + "long " * 40)
    if step == 15:
        print("PRINTED by someone")
    if step == 20:
        logging.getLogger("library").warning("WARNED by a library")
    time.sleep(0.02)
tracker.finish("finished")
assert handler.stream is sys.stderr
print("MESSAGE after the bar")
"""


def run_in_terminal(code: str, columns: int = 120) -> str:
    leader, follower = pty.openpty()
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tests" / "tracking")))
    env = os.environ | {"PYTHONPATH": path, "TERM": "xterm", "COLUMNS": str(columns), "LINES": "30"}
    process = subprocess.Popen([sys.executable, "-c", code], stdin=follower, stdout=follower, stderr=follower, env=env)
    os.close(follower)
    data, deadline = b"", time.monotonic() + 60
    while time.monotonic() < deadline:
        if select.select([leader], [], [], 0.2)[0]:
            try:
                chunk = os.read(leader, 65536)
            except OSError:  # the other end is closed
                break
            data += chunk
        elif process.poll() is not None:
            break
    os.close(leader)
    assert process.wait(timeout=10) == 0, data.decode()
    return data.decode()


def screen(output: str) -> list[str]:
    """The lines that stand on the terminal in the end: carriage return, erase line and cursor up, as rich uses them."""
    lines, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+", output):
        if token == "\r":
            column = 0
        elif token == "\n":
            row, column = row + 1, 0
            if row == len(lines):
                lines.append("")
        elif token.startswith("\x1b["):
            if token.endswith("K"):
                lines[row] = ""
            elif token.endswith("A"):
                row = max(0, row - int(token[2:-1] or 1))
        else:
            line = lines[row].ljust(column)
            lines[row] = line[:column] + token + line[column + len(token) :]
            column += len(token)
    return [line.rstrip() for line in lines]


def test_bar_in_a_terminal():
    lines = screen(run_in_terminal(SCRIPT))
    assert lines[0] == "MESSAGE before the bar" and "MESSAGE after the bar" in lines
    assert "MESSAGE [red]not markup[/red] " + "long " * 17 + "long" in "".join(lines)
    assert "PRINTED by someone" in lines and "WARNED by a library" in lines
    bars = [line for line in lines if "30/30" in line]
    assert len(bars) == 1 and re.search(r"loss \d\.\d{3}  eval/loss \d\.\d{3}  lr 5\.0e-04  1,2\d\d tok/s", bars[0])
    assert bars[0].endswith("finished")
    assert not any(re.search(r"\d+/30", line) for line in lines if line not in bars), "a bar was left above"


def test_a_narrow_terminal_keeps_step_and_eta():
    last = [line for line in screen(run_in_terminal(SCRIPT, columns=72)) if line.startswith("step")]
    assert len(last) == 1 and last[0].startswith("step 30/30") and last[0].endswith("finished") and "loss" in last[0]
