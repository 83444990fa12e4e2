"""A stream that cannot end a run: when its reader is gone, it falls silent.

`thinwire train run.toml | head` closes the pipe after ten lines, and a terminal may be closed
under a run of days. What is shown is a convenience; what is trained is not.
"""

import contextlib
import os
from collections.abc import Callable
from typing import Any, TextIO


class SafeStream:
    """A text stream around another, whose writes never fail; all else is the other's own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lost = False

    def write(self, text: str) -> int:
        """Write the text, with what the stream's encoding lacks replaced."""
        encoding = self._stream.encoding or "utf-8"
        self._attempt(self._stream.write, text.encode(encoding, "replace").decode(encoding))
        return len(text)

    def flush(self) -> None:
        """Hand on what is buffered."""
        self._attempt(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _attempt(self, act: Callable[..., object], *values: str) -> None:
        if self._lost:
            return
        try:
            act(*values)
        except (
            OSError,
            ValueError,
        ):  # a broken pipe, a full disk, a hung-up terminal; a closed file
            self._lost = True
            self._discard()

    def _discard(self) -> None:
        """Let what is still buffered go nowhere: at the program's end it would fail once more."""
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            try:
                os.dup2(nowhere, self._stream.fileno())
            finally:
                os.close(nowhere)
