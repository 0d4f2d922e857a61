"""Errors that a person can act on. They are printed as they are, without a stack of frames."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Something the user can mend: the message names the key, file, line or row and what was expected.

    ``exit_code`` is what the process ends with: 1 for a failure in a run, 2 for a wrong configuration.
    """

    exit_code = 1


class ConfigError(UserError):
    """A setting is unknown, mistyped, impossible or without effect."""

    exit_code = 2


class DataError(UserError):
    """A data file or row is wrong; the message names file, physical line and reason."""


class CheckpointError(UserError):
    """A checkpoint is missing, incomplete, damaged, unsafe or does not fit the run."""


class Stopped(Exception):
    """The run was asked to stop (signal) and has saved a checkpoint. The process ends with EXIT_STOPPED."""


EXIT_STOPPED = 75  # EX_TEMPFAIL: run the same command again to continue
EXIT_INTERRUPTED = 130  # a second signal: left at once, nothing saved beyond the last checkpoint


def similar(name: str, valid: Iterable[str]) -> str:
    """Text to put behind a message, "; did you mean ...?", or nothing where no name is near."""
    close = difflib.get_close_matches(str(name), [str(v) for v in valid], n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else ""


def nearest(name: str, valid: Iterable[str]) -> str:
    """Hint for an unknown ``name``: the nearest of ``valid``, or all of them where none is near."""
    names = [str(v) for v in valid]
    close = difflib.get_close_matches(str(name), names, n=1, cutoff=0.6)
    if close:
        return f"did you mean '{close[0]}'?"
    return f"valid: {', '.join(names)}" if names else "nothing is valid here"
