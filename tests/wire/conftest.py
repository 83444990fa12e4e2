"""Pipes of each kind, joined in this process, for the tests of the wire room."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from knocking import Service
from wiring import HOST, MAX_MESSAGE, PEER

from thinwire.wire import Listener, Pipe, dial, memory_pair
from waiting import PATIENCE


@pytest.fixture
def listener():
    listener = Listener(HOST, "127.0.0.1", 0, MAX_MESSAGE)
    yield listener
    listener.close()


@pytest.fixture
def connect(listener):
    """Dial the listener by a name; returns the accepted and the dialed end."""
    opened: list[Pipe] = []

    def connect(name):
        with ThreadPoolExecutor(1) as pool:
            accepted = pool.submit(listener.accept, name, PATIENCE)
            dialed = dial(listener.address, name, PEER, HOST.fingerprint, PATIENCE, MAX_MESSAGE)
            opened.extend((accepted.result(), dialed))
            return accepted.result(), dialed

    yield connect
    listener.close()  # first, so that no pipe waits for its other end to read
    for pipe in opened:
        pipe.close()


@pytest.fixture(params=["memory", "accepted first", "dialed first"])
def pipes(request):
    """Two joined ends; over TLS the two sides differ, so each comes first once."""
    if request.param == "memory":
        return memory_pair()
    accepted, dialed = request.getfixturevalue("connect")("peer")
    return (accepted, dialed) if request.param == "accepted first" else (dialed, accepted)


@pytest.fixture
def service():
    service = Service()
    yield service
    service.close()
