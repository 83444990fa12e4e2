"""A stream that cannot end a run, nor hold it up.

`thinwire train run.toml | head` closes the pipe after ten lines, and a terminal may be closed
under a run of days: then the stream falls silent. A reader may also stop reading and stay, as
Ctrl-S, `| less` and a stalled connection do: then what is written waits on a thread of its own,
and the oldest of it is dropped in the end. What is shown is a convenience; what is trained is not.
"""

import collections
import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import Any, TextIO

_HELD_BYTES = 1 << 20  # for a reader that does not read
_STALLED_S = 2.0  # no byte taken for so long: a reader that has stopped


class SafeStream:
    """A text stream around another, whose writes never fail; all else is the other's own.

    They may wait for the reader, until `never_wait` is called. A stream that is a file, a pipe or a
    terminal is written on a daemon thread, oldest text first, so that a program can end while its
    reader has stopped.
    """

    def __init__(self, stream: TextIO, after: "SafeStream | None" = None) -> None:
        """`after`: a stream whose text goes first, for a reader who sees both."""
        self._stream = stream
        self._after = after
        self._descriptor = _descriptor(stream)
        self._may_drop = False
        self._held: collections.deque[bytes] = collections.deque()
        self._size = 0  # bytes held
        self._dropped = 0  # texts, since the last one that was written
        self._taken = 0  # bytes that the reader has taken
        self._is_writing = self._is_started = self._is_lost = False
        self._changed = threading.Condition()
        self._attempt(stream.flush)

    def never_wait(self) -> None:
        """From now on `write` returns at once, whatever the reader does."""
        self._may_drop = True

    def write(self, text: str) -> int:
        """Write the text, with what the stream's encoding lacks replaced."""
        encoding = self._stream.encoding or "utf-8"
        encoded = text.encode(encoding, "replace")
        if self._descriptor is None:
            self._attempt(self._stream.write, encoded.decode(encoding))
        elif encoded:
            self._put(encoded)
        return len(text)

    def flush(self) -> None:
        """Hand on what is buffered."""
        if self._descriptor is None or not self._may_drop:
            self.finish(None)

    def finish(self, patience: float | None = _STALLED_S) -> None:
        """Wait until everything is read, or for as long as the reader reads.

        `patience` is how many seconds it may pause; None waits for it without a limit.
        """
        if self._descriptor is None:
            self._attempt(self._stream.flush)
            return
        with self._changed:
            taken, since = self._taken, time.monotonic()
            while not self._is_lost and (self._held or self._is_writing):
                if self._taken != taken:
                    taken, since = self._taken, time.monotonic()
                left = None if patience is None else since + patience - time.monotonic()
                if left is not None and left <= 0:
                    return
                self._changed.wait(left)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _attempt(self, act: Callable[..., object], *values: str) -> None:
        if self._is_lost:
            return
        try:
            act(*values)
        except (OSError, ValueError):
            # a broken pipe, a full disk, a hung-up terminal; a closed file
            self._is_lost = True
            _silence(self._descriptor)

    def _put(self, text: bytes) -> None:
        """Hold the text until the reader takes it.

        When too much is held already, wait for the reader or, if that is allowed, drop the oldest.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._may_drop or self._is_lost or self._size < _HELD_BYTES
            )
            if self._is_lost:
                return
            self._held.append(text)
            self._size += len(text)
            while self._may_drop and self._size > _HELD_BYTES and len(self._held) > 1:
                self._size -= len(self._held.popleft())
                self._dropped += 1
            if not self._is_started:
                self._is_started = True
                threading.Thread(target=self._work, name="thinwire output", daemon=True).start()
            self._changed.notify_all()

    def _work(self) -> None:
        assert self._descriptor is not None
        try:
            while True:
                with self._changed:
                    self._is_writing = False
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._held)
                    self._is_writing = True
                    text = self._held.popleft()
                    self._size -= len(text)
                    lost, self._dropped = self._dropped, 0
                if lost:
                    gap = f"[note]  {lost} earlier pieces of output were dropped unread\n"
                    text = gap.encode() + text
                if self._after is not None:
                    self._after.finish()
                # Not through the stream: a thread that waits in there would keep the stream's
                # lock, and the program could not end.
                while text:
                    count = os.write(self._descriptor, text)
                    text = text[count:]
                    with self._changed:
                        self._taken += count
                        self._changed.notify_all()
        except OSError:
            _silence(self._descriptor)
        finally:
            with self._changed:
                self._is_lost = True
                self._changed.notify_all()


def safe_stream(stream: TextIO | SafeStream) -> SafeStream:
    """The stream as a safe one that never waits; one object for each stream keeps its order."""
    safe = stream if isinstance(stream, SafeStream) else SafeStream(stream)
    safe.never_wait()
    return safe


def _descriptor(stream: TextIO) -> int | None:
    """The file descriptor of a stream that has one; what is kept in memory has none."""
    try:
        return stream.fileno()
    except (AttributeError, OSError, ValueError):
        return None


def _silence(descriptor: int | None) -> None:
    """Let what is still buffered go nowhere: at the program's end it would fail once more."""
    if descriptor is not None:
        with contextlib.suppress(OSError), open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), descriptor)
