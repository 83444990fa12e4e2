"""What happened in a run, in words and with the time: joined, lost, taken over, saved, noted.

events.jsonl in the folder of a run holds a JSON object for each: {"kind": the tag that the
terminal shows, "time": ..., "text": ...}. It stays when the run is resumed.
"""

import contextlib
import threading
from collections import deque
from pathlib import Path

from thinwire.errors import printable
from thinwire.report.metrics import line_of

EVENTS_FILE = "events.jsonl"
SECRETS = ("invite", "web")  # tags of lines that let people in: they stay on the terminal
_LONGEST = 2000  # characters of one
_HELD = 100  # before there is a folder


class Story:
    """Appends events to the folder of a run, from the moment on that there is one, on any thread.

    A full disk costs events, but nothing else.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._held: deque[str] = deque(maxlen=_HELD)
        self._lock = threading.Lock()

    def tell(self, kind: str, text: str) -> None:
        """Add an event."""
        if kind in SECRETS:
            return
        with self._lock:
            self._held.append(line_of(kind, {"text": printable(text, _LONGEST)}))
            if not self._folder.is_dir():
                return
            with contextlib.suppress(OSError), (self._folder / EVENTS_FILE).open("a") as file:
                while self._held:
                    file.write(self._held.popleft())
