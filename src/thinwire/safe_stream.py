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
from collections.abc import Callable
from typing import Any, TextIO

_MOST_HELD = 4096  # pieces of text, for a reader that does not read
_STALLED_S = 2.0  # no byte taken for so long: a reader that has stopped


class SafeStream:
    """A text stream around another, whose writes never fail; all else is the other's own.

    They may wait for the reader, until `never_wait` is called: then a file, a pipe or a terminal is
    written on a daemon thread, so that a program can end while its reader has stopped.
    """

    def __init__(self, stream: TextIO, after: "SafeStream | None" = None) -> None:
        """`after`: a stream whose text goes first, for a reader who sees both."""
        self._stream, self._after = stream, after
        self._descriptor: int | None = None  # as of what is kept in memory
        with contextlib.suppress(AttributeError, OSError, ValueError):
            self._descriptor = stream.fileno()
        self._is_waiting, self._is_lost, self._is_idle = True, False, True
        self._held: collections.deque[bytes] = collections.deque(maxlen=_MOST_HELD)
        self._dropped = 0  # texts, since the last one that was written
        self._lock = threading.RLock()
        self._more, self._read = (threading.Condition(self._lock) for _ in range(2))
        self._attempt(stream.flush)

    def never_wait(self) -> None:
        """From now on `write` returns at once, whatever the reader does."""
        if self._is_waiting and self._descriptor is not None:
            self._is_waiting = False
            threading.Thread(target=self._work, name="thinwire output", daemon=True).start()

    def write(self, text: str) -> int:
        """Write the text, with what the stream's encoding lacks replaced."""
        encoding = self._stream.encoding or "utf-8"
        encoded = text.encode(encoding, "replace")
        if self._descriptor is None:
            self._attempt(self._stream.write, encoded.decode(encoding))
        elif self._is_waiting:
            self._attempt(self._pass_on, encoded)
        elif encoded:
            with self._lock:  # until the reader takes it; the oldest gives way where it is too much
                self._dropped += len(self._held) == _MOST_HELD
                self._held.append(encoded)
                self._is_idle = False
                self._more.notify()
        return len(text)

    def flush(self) -> None:
        """Hand on what the stream has buffered, which is nothing where it has a descriptor."""
        if self._descriptor is None:
            self._attempt(self._stream.flush)

    def finish(self, patience: float | None = _STALLED_S) -> None:
        """Wait until everything is read, or until the reader pauses for so long; None: any time."""
        self.flush()
        with self._lock:
            while not (self._is_idle or self._is_lost) and self._read.wait(patience):
                pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _attempt(self, act: Callable[..., object], *values: Any) -> None:
        if self._is_lost:
            return
        try:
            act(*values)
        except (OSError, ValueError):
            # a broken pipe, a full disk, a hung-up terminal; a closed file
            self._is_lost = True
            if self._descriptor is not None:
                # What is still buffered goes nowhere: at the program's end it would fail once more.
                with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:
                    os.dup2(nowhere.fileno(), self._descriptor)

    def _pass_on(self, text: bytes) -> None:
        """Write to the descriptor itself: a thread that waits in a stream keeps its lock, and what
        a stream has buffered is written once more at the end; either way the program could not end.
        """
        assert self._descriptor is not None
        while text:
            text = text[os.write(self._descriptor, text) :]
            with self._lock:
                self._read.notify_all()

    def _work(self) -> None:
        while not self._is_lost:
            with self._lock:
                self._more.wait_for(lambda: self._held)
                text, lost = self._held.popleft(), self._dropped
                self._dropped = 0
            if lost:
                gap = f"[note]  {lost} earlier pieces of output were dropped unread\n"
                text = gap.encode() + text
            if self._after is not None:
                self._after.finish()
            self._attempt(self._pass_on, text)
            with self._lock:
                self._is_idle = not self._held
                self._read.notify_all()


def safe_stream(stream: TextIO | SafeStream) -> SafeStream:
    """The stream as a safe one that never waits; one object for each stream keeps its order."""
    safe = stream if isinstance(stream, SafeStream) else SafeStream(stream)
    safe.never_wait()
    return safe


def wait_for_no_reader() -> None:
    """From now on neither standard output nor errors wait: whoever reads must not stop a run."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, SafeStream):
            stream.never_wait()
