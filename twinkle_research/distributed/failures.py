"""What is recorded and shown when a rank fails: the error of the rank that failed first, not of its peers."""

from __future__ import annotations

import contextlib
import os
import signal
import traceback
from pathlib import Path
from typing import Any

from twinkle_research.distributed.signals import signal_name
from twinkle_research.errors import ConfigError, UserError

_COLLECTIVES = os.path.join("torch", "distributed", "")
_LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting", "caused pair closure")


def leave_word(error: UserError) -> None:
    """For the job (slurm/job.sh), to which srun only tells that it has ended the other ranks: this one was refused, for that
    and no other reason, and would be again."""
    path = os.environ.get("TWINKLE_REFUSAL")
    if path:
        with contextlib.suppress(OSError):
            Path(path).write_text(f"{error}\n", encoding="utf-8")


def error_record(error: BaseException, rank: int) -> dict[str, Any]:
    """A JSON-able account of ``error``. ``peer``: it may be only the echo of another rank's end."""
    user = isinstance(error, UserError)
    return {
        "rank": rank,
        "type": type(error).__name__,
        "message": str(error) or "no message",
        "user": user,
        "peer": is_echo(error),
        "exit_code": error.exit_code if isinstance(error, UserError) else 1,
        "traceback": "".join(traceback.format_exception(error)),
    }


def death_record(rank: int, code: int, log: Path) -> dict[str, Any]:
    """A worker that left no account: killed by a signal (``code`` < 0) or gone with an exit code."""
    if code < 0:
        message = f"killed by {signal_name(-code)}"
        if -code == signal.SIGKILL:
            message += " (by hand or by the system; most often the machine ran out of memory)"
    else:
        message = f"ended with exit code {code} and without an account of why"
    record = {"rank": rank, "type": "", "message": message, "user": False, "peer": False, "exit_code": 1}
    return record | {"traceback": f"none was left; the last output of rank {rank} is in {log}"}


def is_echo(error: BaseException | None) -> bool:
    """Whether a collective or a lost connection is at the root of ``error``."""
    while error is not None:
        frames = traceback.extract_tb(error.__traceback__)
        if frames and _COLLECTIVES in frames[-1].filename or any(text in str(error) for text in _LOST_PEER):
            return True
        error = error.__cause__ or error.__context__
    return False


def user_text(message: object, exit_code: int) -> str:
    """How an error that the user can mend is shown, everywhere."""
    return f"{'config error' if exit_code == ConfigError.exit_code else 'error'}: {message}"


def failure_text(record: dict[str, Any], log: Path, world_size: int) -> str:
    """The one screen that a person sees: the message, whose it is, and where the traceback lies."""
    if record["user"]:
        return user_text(record["message"], record["exit_code"])
    who = f"rank {record['rank']}: " if world_size > 1 else ""
    kind = f"{record['type']}: " if record["type"] else ""
    hint = "\n  another rank is gone without an account (killed, or out of memory?)" if record["peer"] and world_size > 1 else ""
    return f"error: {who}{kind}{record['message']}{hint}\n  {'the traceback is' if kind else 'what it last wrote is'} in {log}"
