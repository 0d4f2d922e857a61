"""The run folder's names, status and logs."""

from __future__ import annotations

import io
import json
import logging
import sys

import pytest

from twinkle_research.distributed.failures import error_record, failure_text, is_echo
from twinkle_research.errors import ConfigError, DataError
from twinkle_research.trainer.ranklog import RankLog, Tee
from twinkle_research.trainer.rundir import RunFolder, new_run_dir


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    folder = RunFolder(tmp_path / "X")
    folder.create()
    return folder


def test_new_run_dirs_differ(tmp_path):
    made = {new_run_dir("cross_entropy", "tiny", root=tmp_path / "runs") for _ in range(200)}
    assert len(made) == 200 and all(path.is_dir() for path in made)
    shared = {new_run_dir("cross_entropy", "tiny", job_key="slurm-7.0", root=tmp_path / "runs") for _ in range(2)}
    assert [path.name for path in shared] == ["slurm-7.0-cross_entropy-tiny"]


def test_status(folder):
    assert folder.read_status() == {}
    folder.write_status("running", pid=1)
    assert folder.read_status()["step"] == 0
    folder.metrics.write_text('{"step": 1, "loss": NaN}\n{"step": 2, "loss": 1.0}\n{"step": 3, "lo')
    folder.write_status("failed", message="x")
    assert {k: folder.read_status().get(k) for k in ("state", "step", "message", "pid")} == {
        "state": "failed", "step": 2, "message": "x", "pid": None,
    }  # fmt: skip
    folder.write_status("finished", step=9)
    assert folder.read_status()["step"] == 9
    with pytest.raises(ValueError, match="done"):
        folder.write_status("done")
    assert not list(folder.path.glob("*.tmp"))


def test_first_error_stands(folder):
    assert folder.read_error() is None
    assert folder.claim_error({"rank": 1})
    assert not folder.claim_error({"rank": 0})
    assert folder.read_error() == {"rank": 1}


def test_tee_keeps_whole_lines_as_they_ended():
    screen, log = io.StringIO(), io.StringIO()
    tee = Tee(screen, [log])
    for text in (
        "a",
        "b\nc\r\n",
        "\r\x1b[2K1/3 \x1b[32mbar\x1b[0m",
        "\r\x1b[2K2/3 bar",
        "\r\x1b[2Ka message\n2/3 bar",
        "\r3/3 bar\nend",
    ):
        tee.write(text)
    tee.finish()
    assert log.getvalue() == "ab\nc\r\na message\n3/3 bar\nend\n"
    assert "\x1b[32mbar" in screen.getvalue()
    assert tee.isatty() is False


def test_rank_log(folder, capsys):
    for rank in (0, 1):
        with RankLog(folder, rank) as log:
            print(f"print {rank}")
            print(f"to stderr {rank}", file=sys.stderr)
            logging.getLogger("twinkle_research.checkpoint").warning("warning %d", rank)
            logging.getLogger("twinkle_research.checkpoint").info("info %d", rank)
            log.keep(f"only kept {rank}")
            if rank == 1:
                log.show("shown 1")
    screen = capsys.readouterr()
    assert screen.out == "print 0\n"
    assert screen.err == "to stderr 0\nwarning 0\ninfo 0\nshown 1\n"
    kept = [folder.rank_log(rank).read_text().splitlines()[1:] for rank in (0, 1)]
    assert kept[0] == ["print 0", "to stderr 0", "warning 0", "info 0", "only kept 0"]
    assert kept[1] == ["print 1", "to stderr 1", "warning 1", "only kept 1", "shown 1"]
    assert folder.train_log.read_text().splitlines()[1:] == ["print 0", "to stderr 0", "warning 0", "info 0"]


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def test_failure_texts(tmp_path):
    log = tmp_path / "rank-1.log"
    record = error_record(raised(KeyError("x")), 1)
    assert json.loads(json.dumps(record)) == record
    assert failure_text(record, log, 2) == f"error: rank 1: KeyError: 'x'\n  the traceback is in {log}"
    assert failure_text(record, log, 1).startswith("error: KeyError: 'x'\n")
    assert failure_text(error_record(raised(DataError("a.jsonl:3: bad")), 1), log, 2) == "error: a.jsonl:3: bad"
    assert failure_text(error_record(raised(ConfigError("lr")), 0), log, 2) == "config error: lr"
    assert error_record(raised(ConfigError("lr")), 0)["exit_code"] == 2
    lost = error_record(raised(RuntimeError("[gloo/pair.cc] Connection closed by peer")), 0)
    assert lost["peer"] and "another rank is gone" in failure_text(lost, log, 2)


def test_echo_is_found_in_the_cause():
    try:
        try:
            raise RuntimeError("Connection reset by peer")
        except RuntimeError as cause:
            raise ValueError("the step failed") from cause
    except ValueError as error:
        assert is_echo(error)
    assert not is_echo(raised(ValueError("all mine")))
