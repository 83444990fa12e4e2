"""Ties a stage to its coordinator. Imports nothing slow, for it comes first in a stage."""

import contextlib
import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_coordinator() -> None:
    """Have Linux end this process with the thread that started it, even while it is stopped.

    A stopped process sees no end of its standard input. The coordinator starts stages on the
    thread that also ends them, so that thread does not end before.
    """
    if sys.platform.startswith("linux"):
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
