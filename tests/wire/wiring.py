"""What several tests of the wire room need."""

import contextlib
import threading

from thinwire.errors import WireError
from thinwire.wire import Frame, Identity, Pipe
from waiting import PATIENCE

HOST = Identity.create("coordinator")
PEER = Identity.create("peer", HOST.public)
MAX_PAYLOAD = 16 << 20
MAX_MESSAGE = MAX_PAYLOAD + 64
HOURLY = 7200.0  # notices nothing in the time of a test


class Recorder:
    """Collects what a link reports."""

    def __init__(self):
        self.frames: list[Frame] = []
        self.errors: list[WireError] = []
        self.ends = 0
        self._changed = threading.Condition()

    def on_frame(self, frame):
        with self._changed:
            self.frames.append(frame)
            self._changed.notify_all()

    def on_broken(self, error):
        with self._changed:
            self.errors.append(error)
            self._changed.notify_all()

    def on_end(self):
        with self._changed:
            self.ends += 1
            self._changed.notify_all()

    def wait(self, condition):
        with self._changed:
            assert self._changed.wait_for(condition, PATIENCE), vars(self)


class Passed(Pipe):
    """A pipe that does what another does, for tests that change some of that."""

    def __init__(self, pipe):
        self._pipe = pipe

    def write(self, message):
        self._pipe.write(message)

    def read(self):
        return self._pipe.read()

    def close(self, grace=5.0):
        self._pipe.close(grace)


def in_background(work):
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def writing(pipe, messages):
    """Write these until the pipe takes no more; who does, and what it has written so far."""
    written: list[bytes] = []

    def write():
        with contextlib.suppress(WireError):
            for message in messages:
                pipe.write(message)
                written.append(message)

    return in_background(write), written


def read_all(pipe):
    return list(iter(pipe.read, None))
