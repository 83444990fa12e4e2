"""A stream that cannot end a run, nor hold it up.

Where its reader has left, as `| head` does, it falls silent. Where a reader stays and stops
reading, as with Ctrl-S, `| less` or a stalled connection, what is written waits on a thread of its
own, and the oldest of it is dropped in the end.
"""

import collections
import contextlib
import os
import sys
import threading
from typing import Any, TextIO

_MOST_HELD = 4096  # pieces of text, for a reader that does not read
STALLED_SECONDS = 2.0  # no byte taken for so long: a reader that has stopped


class SafeStream:
    """A text stream around another, whose writes never fail; all else is the other's own.

    They may wait for the reader, until `never_wait` is called: then a file, a pipe or a terminal is
    written on a daemon thread, so that a program can end while its reader has stopped.
    """

    def __init__(self, stream: TextIO | None) -> None:
        """`stream`: None where it was closed from the start."""
        stream = stream or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        self._stream, self._encoding = stream, stream.encoding or "utf-8"
        self._descriptor: int | None = None  # as of what is kept in memory
        with contextlib.suppress(AttributeError, OSError, ValueError):
            self._descriptor = stream.fileno()
            stream.flush()
        self._is_waiting, self._is_idle = True, True
        self._held: collections.deque[bytes] = collections.deque(maxlen=_MOST_HELD)
        self._dropped = 0  # texts, since the last one that was written
        lock = threading.RLock()
        self._more, self._taken = threading.Condition(lock), threading.Condition(lock)

    def never_wait(self) -> None:
        """From now on `write` returns at once, whatever the reader does."""
        if self._is_waiting and self._descriptor is not None:
            self._is_waiting = False
            threading.Thread(target=self._work, name="thinwire output", daemon=True).start()

    def write(self, text: str) -> int:
        """Write the text, with what the stream's encoding lacks replaced."""
        encoded = text.encode(self._encoding, "replace")
        if self._is_waiting:
            self._put(encoded)
        elif encoded:
            with self._more:  # the oldest gives way where a reader takes too little
                self._dropped += len(self._held) == _MOST_HELD
                self._held.append(encoded)
                self._is_idle = False
                self._more.notify()
        return len(text)

    def flush(self) -> None:
        """Do nothing: what is written is not buffered."""

    def finish(self, patience: float | None = STALLED_SECONDS) -> None:
        """Wait until everything is read, or until the reader pauses for so long; None: any time."""
        with self._taken:
            while not self._is_idle and self._taken.wait(patience):
                pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _put(self, text: bytes) -> None:
        """Write to the descriptor itself: a thread that waits in a stream keeps its lock, and what
        a stream has buffered is written once more at the end; either way the program could not end.
        """
        with contextlib.suppress(OSError, ValueError):  # a closed file, no descriptor left
            if self._descriptor is None:
                self._stream.write(text.decode(self._encoding))
                self._stream.flush()
                return
            try:
                while text:
                    text = text[os.write(self._descriptor, text) :]
            except OSError:  # a broken pipe, a full disk, a hung-up terminal
                # All else goes nowhere, also what is still buffered: the program's end would fail.
                with open(os.devnull, "wb") as nowhere:
                    os.dup2(nowhere.fileno(), self._descriptor)

    def _work(self) -> None:
        while True:
            with self._more:
                self._is_idle = not self._held
                self._taken.notify_all()
                self._more.wait_for(lambda: self._held)
                text, lost = self._held.popleft(), self._dropped
                self._dropped = 0
            if lost:
                gap = f"[note]  {lost} earlier pieces of output were dropped unread\n"
                text = gap.encode() + text
            self._put(text)


def wait_for_no_reader() -> None:
    """From now on neither standard output nor errors wait: whoever reads must not stop a run."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, SafeStream):
            stream.never_wait()
