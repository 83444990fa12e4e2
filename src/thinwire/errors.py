"""Errors a user can act on. Every room may import this file.

Each message says what failed, why, and what to do. The command line turns one into plain lines and
the exit code of its class; anything else is a defect of ours and keeps its traceback.
"""

import unicodedata


def printable(text: str, longest: int = 4000) -> str:
    """Text of another process, fit for a screen or a log: not endless, and without control
    characters, which a terminal obeys whoever sends them. Line breaks and tabs stay.
    """
    if len(text) > longest:
        text = f"{text[:longest]} ... ({len(text) - longest} more characters)"
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c)[0] != "C")


def first_line(error: Exception) -> str:
    """What an error of another library says, without the advice behind it."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


class ThinwireError(Exception):
    """Base of all errors that are meant for the user."""

    exit_code = 1


class ConfigError(ThinwireError):
    """The settings cannot work: unknown key, wrong type, impossible combination."""

    exit_code = 2


class GoneError(ConfigError):
    """Settings with an option that has gone: 0.1.0 is the last release that has it."""

    def __init__(self, what: str):
        way = "Runs and checkpoints with it open with release 0.1.0: pip install thinwire==0.1.0"
        super().__init__(f"{what} has gone from thinwire. {way}")


class DataError(ThinwireError):
    """The corpus or the tokenizer cannot be used."""

    exit_code = 3


class CheckpointError(ThinwireError):
    """A checkpoint cannot be written, or cannot be trusted when read."""

    exit_code = 4


class WireError(ThinwireError):
    """A frame or a link broke its contract, or the other end is gone."""

    exit_code = 5


class BreachError(WireError):
    """The other end of a link sent what the contract does not allow: the fault is its own."""


class AdmissionError(WireError):
    """An invite or a peer is refused: trying again in the same way will not help."""

    exit_code = 8


class StageError(ThinwireError):
    """A stage died or failed while the run was under way."""

    exit_code = 6


class NotAliveError(ThinwireError):
    """A run is asked, and no process of it is alive there."""

    exit_code = 9


class ScheduleError(ThinwireError):
    """A schedule cannot run: its stages would wait for each other forever."""

    exit_code = 7


class MissingPackageError(ThinwireError):
    """An optional package is not installed: the message names the extra that brings it."""

    exit_code = 10


def outward(error: BaseException) -> str:
    """What another machine is told of an error on this one: nothing of what its files hold, or
    which there are.
    """
    if isinstance(error, DataError | CheckpointError):
        return "files on that machine cannot be used for this run; it says why there"
    if isinstance(error, ThinwireError):
        return str(error)
    named = type(error).__name__
    # Other kinds quote what they could not read. These are of the computation, such as torch's.
    return f"{named}: {error}" if isinstance(error, RuntimeError) else named
