"""W&B with the real client: offline records read back, online against a server in memory, resume, and every way to fail."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tracked_run import loss_at

from twinkle_research.tracking.wandb_log import read_history, read_records


def attempts(run: Path) -> list[Path]:
    return sorted(p for p in (run / "wandb").glob("*run-*/*.wandb") if not p.parent.is_symlink())


def steps(rows) -> list[int]:
    """Steps of the rows with metrics, in the order in which they were logged."""
    return [row["step"] for row in rows if "loss" in row]


def tables(rows) -> list[int]:
    return [row["step"] for row in rows if "samples._type" in row or "samples" in row]


def offline_rows(run: Path) -> list[dict]:
    return [row for path in attempts(run) for row in read_history(path)]


def jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# --- offline ------------------------------------------------------------------------------------------------------


def test_offline_records_every_metric_once_under_our_step(launch, tmp_path):
    launch(first=1, last=6, sleep=0.2)
    rows = [row for row in offline_rows(tmp_path / "run") if "loss" in row]
    assert steps(rows) == [1, 2, 3, 4, 5, 6]
    timing = {row["step"]: row for row in jsonl(tmp_path / "run" / "timing.jsonl")}
    for row, metrics in zip(rows, jsonl(tmp_path / "run" / "metrics.jsonl"), strict=True):
        expected = {k: v for k, v in (metrics | timing[row["step"]]).items() if v is not None}
        assert {k: v for k, v in row.items() if k in expected} == expected
    (path,) = attempts(tmp_path / "run")
    kinds = {record.WhichOneof("record_type"): record for record in read_records(path)}
    metrics = [r.metric for r in read_records(path) if r.WhichOneof("record_type") == "metric"]
    assert {m.name or m.glob_name for m in metrics} == {"step", "*"} and kinds["exit"].exit.exit_code == 0
    assert "wandb sync" in launch(first=7, last=7, resume=6).stdout


def test_the_config_and_identity_are_recorded(launch, tmp_path):
    launch(first=1, last=1, folder=str(tmp_path / "sweeps" / "2026-01-01" / "3"))
    (path,) = attempts(tmp_path / "sweeps" / "2026-01-01" / "3")
    run = next(r.run for r in read_records(path) if r.WhichOneof("record_type") == "run")
    assert (run.display_name, run.run_group, run.project) == ("2026-01-01-3", "2026-01-01", "twinkle_research")
    config = {u.key: json.loads(u.value_json) for r in read_records(path) for u in r.config.update} | {
        u.key: json.loads(u.value_json) for u in run.config.update
    }
    assert config["trainer"]["max_steps"] == 100 and config["tracking"]["wandb"]["mode"] == "offline"


@pytest.mark.parametrize("shift", [0.0, 0.25], ids=["same values", "other values"])
def test_s28_resume_after_a_crash(launch, tmp_path, shift):
    """S28: steps 1 to 5, checkpoint at 3, kill, resume. Replayed equal steps are not logged twice, others all arrive."""
    killed = launch(first=1, last=5, sleep=3.0, kill=True)
    assert killed.returncode == -9
    assert steps(offline_rows(tmp_path / "run")) == [1, 2, 3, 4, 5]
    launch(first=4, last=6, resume=3, shift=shift)
    first, second = attempts(tmp_path / "run")
    assert first.name == second.name  # one run id
    resumed = list(read_history(second))
    assert steps(resumed) == ([6] if shift == 0.0 else [4, 5, 6])
    last = {row["step"]: row["loss"] for row in offline_rows(tmp_path / "run") if "loss" in row}
    assert last == {s: loss_at(s, shift if s > 3 else 0.0) for s in range(1, 7)}
    assert tables(offline_rows(tmp_path / "run")) == [2, 4, 6]  # none pushed a counter past the training step


def test_rows_lost_by_the_kill_are_sent_on_resume(launch, tmp_path):
    """Killed at once: wandb has written nothing yet, but the checkpoint at step 3 has these steps behind it."""
    launch(first=1, last=3, kill=True)
    launch(first=4, last=6, resume=3)
    rows = {row["step"]: row for row in offline_rows(tmp_path / "run") if "loss" in row}
    assert {s: row["loss"] for s, row in rows.items()} == {s: loss_at(s) for s in range(1, 7)}
    assert rows[2]["eval/loss"] == loss_at(2) + 0.1
    assert steps(offline_rows(tmp_path / "run")) == [1, 2, 3, 4, 5, 6]
    assert tables(offline_rows(tmp_path / "run")) == [2, 4, 6]


def test_crash_before_the_first_checkpoint_keeps_the_run(launch, tmp_path):
    launch(first=0, last=3, sleep=3.0, kill=True)
    launch(first=0, last=5)
    assert len({p.name for p in attempts(tmp_path / "run")}) == 1
    assert steps(offline_rows(tmp_path / "run")) == [0, 1, 2, 3, 4, 5]


def test_samples_are_tables_on_the_same_step_axis(launch, tmp_path):
    launch(first=1, last=4)
    rows = offline_rows(tmp_path / "run")
    assert tables(rows) == [2, 4] and steps(rows) == [1, 2, 3, 4]
    path = next(row["samples.path"] for row in rows if row["step"] == 4 and "samples.path" in row)
    table = json.loads((attempts(tmp_path / "run")[0].parent / "files" / path).read_text())
    assert table["columns"] == ["prompt", "completion"] and table["data"] == [["Who are you?", "answer of step 4"]]


def test_stopped_marks_the_run_as_preempted(launch, tmp_path):
    launch(first=1, last=2, state="stopped")
    (path,) = attempts(tmp_path / "run")
    kinds = [record.WhichOneof("record_type") for record in read_records(path)]
    code = next(r.exit.exit_code for r in read_records(path) if r.WhichOneof("record_type") == "exit")
    assert "preempting" in kinds and code == 75


# --- online -------------------------------------------------------------------------------------------------------


def test_s28_online_resume_continues_the_same_run(launch, server, tmp_path):
    first = launch(server=server, mode="online", first=1, last=5)
    again = launch(server=server, mode="online", first=4, last=6, resume=3)
    assert first.report["id"] == again.report["id"]
    ((name, run),) = server.runs.items()
    assert name == first.report["id"] and run["sessions"] >= 2
    assert {row["step"]: row["loss"] for row in run["history"] if "loss" in row} == {s: loss_at(s) for s in range(1, 7)}
    assert steps(run["history"]) == [1, 2, 3, 4, 5, 6]
    assert tables(run["history"]) == [2, 4, 6] and run["artifacts"]
    assert [row["_step"] for row in run["history"]] == sorted(row["_step"] for row in run["history"])
    assert run["summary"]["step"] == {"max": 6} and run["config"]["trainer"]["value"]["max_steps"] == 100


def test_online_after_a_kill_sends_what_the_server_lacks(launch, server):
    """Killed before the client has sent anything; the resumed process fills the gap from metrics.jsonl."""
    launch(server=server, mode="online", first=1, last=5, kill=True, sleep=1.5)
    done = launch(server=server, mode="online", first=4, last=6, resume=3)
    ((_, run),) = server.runs.items()
    assert steps(run["history"]) == [1, 2, 3, 4, 5, 6], done.stdout


def test_online_after_offline_sends_everything(launch, server):
    launch(first=1, last=4)
    launch(server=server, mode="online", first=4, last=6, resume=3)
    ((_, run),) = server.runs.items()
    assert steps(run["history"]) == [1, 2, 3, 4, 5, 6]


def test_wandb_sync_of_offline_attempts_gives_one_run(launch, server, tmp_path):
    """The command that the run prints."""
    launch(first=1, last=5)
    launch(first=4, last=6, resume=3)
    command = [sys.executable, "-m", "wandb", "sync", "--yes"]
    home = tmp_path / "other-home"
    env = {"PATH": "/usr/bin:/bin", "HOME": str(home), "WANDB_BASE_URL": server.url, "WANDB_API_KEY": "a" * 40}
    done = subprocess.run(command, cwd=tmp_path / "run", env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    ((_, run),) = server.runs.items()
    assert sorted(steps(run["history"])) == [1, 2, 3, 4, 5, 6]


# --- failures never stop or slow the training -------------------------------------------------------------------------


def closed_port() -> str:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{sock.getsockname()[1]}"


def test_no_server_records_offline_and_says_so_once(launch, tmp_path):
    done = launch(server=closed_port(), mode="online", first=1, last=50)
    assert done.report["log"] < 1.0 and done.report["finish"] < 10
    warnings = [line for line in done.stdout.splitlines() if line.startswith("W&B") and "cannot be used" in line]
    assert len(warnings) == 1 and "recording offline" in warnings[0] and "wandb sync" in warnings[0]
    assert steps(offline_rows(tmp_path / "run")) == list(range(1, 51))


LIMITS = {"PROBE_SECONDS": 1.0, "INIT_SECONDS": 2.0, "FINISH_SECONDS": 2.0}


def test_server_that_hangs_neither_stops_nor_slows(launch, server, tmp_path):
    """It accepts connections and never answers: the rows are recorded offline."""
    server.answering.clear()
    done = launch(server=server, mode="online", first=1, last=50, limits=LIMITS)
    assert done.report["log"] < 1.0 and done.report["finish"] < 8
    assert "recording offline" in done.stdout
    assert steps(offline_rows(tmp_path / "run")) == list(range(1, 51))


def test_server_that_hangs_in_the_middle(launch, server, tmp_path):
    """What it did not take stays on the disk, the run ends in bounded time and a later resume sends the rest."""
    stop = threading.Event()

    def hang_after_start() -> None:
        while not stop.wait(0.02):
            if any(run["sessions"] for run in server.runs.values()):
                server.answering.clear()

    watcher = threading.Thread(target=hang_after_start, daemon=True)
    watcher.start()
    done = launch(server=server, mode="online", first=1, last=50, limits=LIMITS)
    stop.set()
    watcher.join()
    assert done.report["log"] < 1.0 and done.report["finish"] < 20
    assert "wandb sync" in done.stdout or "cannot be used" in done.stdout
    assert steps(offline_rows(tmp_path / "run")) == list(range(1, 51))
    server.answering.set()
    launch(server=server, mode="online", first=51, last=51, resume=50)
    ((_, run),) = server.runs.items()
    assert sorted(set(steps(run["history"]))) == list(range(1, 52))
