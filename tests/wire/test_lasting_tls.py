"""A pipe that lasts over real connections under TLS, which a proxy cuts."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from wiring import HOST, HOURLY, MAX_MESSAGE, PEER, in_background, read_all

from proxy import Proxy
from thinwire.wire import LastingPipe, Listener, dial, stream
from waiting import PATIENCE


@pytest.fixture
def listener(monkeypatch):
    """Neither end says that it lives: what is noticed, and told, is up to the pipes."""
    monkeypatch.setattr(stream, "SILENCE_S", HOURLY)
    listener = Listener(HOST, "127.0.0.1", 0, MAX_MESSAGE)
    yield listener
    listener.close()


@pytest.fixture
def path(listener):
    proxy = Proxy(listener.address)
    yield proxy
    proxy.close()


@pytest.fixture
def over_tls(listener, path):
    """The accepted and the dialed end, whose connections take the path."""

    def accept(timeout):
        return listener.accept("peer", timeout, PEER.fingerprint, is_replaceable=True)

    def call(timeout):
        return dial(path.address, "peer", PEER, HOST.fingerprint, timeout, MAX_MESSAGE)

    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(lambda: LastingPipe(accept(PATIENCE), accept, PATIENCE))
        dialed = LastingPipe(call(PATIENCE), call, PATIENCE)
        return accepted.result(PATIENCE), dialed


def test_an_end_that_has_not_noticed_a_loss_is_told_by_the_next_dial(over_tls, path):
    """Until keepalive notices, which it does not here, the dialer would be refused."""
    accepted, dialed = over_tls
    in_background(lambda: read_all(dialed))
    path.cut(leave_listener=True)
    dialed.write(b"again")
    assert accepted.read() == b"again"
    in_background(lambda: read_all(accepted))
    dialed.close()
    accepted.close()
