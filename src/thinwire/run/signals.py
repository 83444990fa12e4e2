"""Signals that ask a process to end."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType


class Interrupted(KeyboardInterrupt):
    """The user asked to leave at once."""


def leave_at_once(number: int, frame: FrameType | None) -> None:
    """For `heeding`: while there is nothing to save, whichever signal asks to end."""
    raise Interrupted


@contextlib.contextmanager
def heeding(on_signal: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Within, signals that ask a process to end call `on_signal`; for the main thread alone."""
    heeded = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
        heeded.append(signal.SIGHUP)  # a closed terminal
    before = {number: signal.signal(number, on_signal) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
