"""Pipes of each kind, joined in this process, for the tests of the wire room."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from thinwire.errors import WireError
from thinwire.wire import Authority, Frame, Listener, Pipe, dial, memory_pair

PATIENCE = 30.0  # only ever reached by a test that fails
MAX_MESSAGE = 16 << 20


class Recorder:
    """Collects what a link reports."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.errors: list[WireError] = []
        self.ends = 0
        self._changed = threading.Condition()

    def on_frame(self, frame: Frame) -> None:
        with self._changed:
            self.frames.append(frame)
            self._changed.notify_all()

    def on_broken(self, error: WireError) -> None:
        with self._changed:
            self.errors.append(error)
            self._changed.notify_all()

    def on_end(self) -> None:
        with self._changed:
            self.ends += 1
            self._changed.notify_all()

    def wait(self, condition: Callable[["Recorder"], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self), PATIENCE), vars(self)


@pytest.fixture
def recorders() -> tuple[Recorder, Recorder]:
    return Recorder(), Recorder()


@pytest.fixture(scope="session")
def authority() -> Authority:
    return Authority.create("tests")


@pytest.fixture
def listener(authority: Authority) -> Iterator[Listener]:
    listener = Listener(authority.issue("host"), "127.0.0.1", 0, MAX_MESSAGE)
    yield listener
    listener.close()


@pytest.fixture
def connect(authority: Authority, listener: Listener) -> Callable[[str], tuple[Pipe, Pipe]]:
    """Dial the listener by a name; returns the accepted and the dialed end."""
    identity = authority.issue("peer")

    def connect(name: str) -> tuple[Pipe, Pipe]:
        with ThreadPoolExecutor(1) as pool:
            accepted = pool.submit(listener.accept, name, PATIENCE)
            dialed = dial(listener.address, name, identity, "host", PATIENCE, MAX_MESSAGE)
            return accepted.result(), dialed

    return connect


@pytest.fixture(params=["memory", "accepted first", "dialed first"])
def pipes(request: pytest.FixtureRequest) -> Iterator[tuple[Pipe, Pipe]]:
    """Two joined ends; over gRPC the two sides differ, so each comes first once."""
    if request.param == "memory":
        here, there = memory_pair()
    else:
        ends = request.getfixturevalue("connect")("peer")
        here, there = ends if request.param == "accepted first" else ends[::-1]
    yield here, there
    here.close()
    there.close()
