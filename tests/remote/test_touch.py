"""A peer's streams to its host."""

import queue
import socket
import threading

import pytest
from thinwire.remote.touch import Lost, Touch

from thinwire.remote import touch
from thinwire.wire import Identity, Route, Routes
from waiting import PATIENCE


def test_a_host_that_is_away_is_named_by_its_own_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(touch, "DIAL_SECONDS", 1.0)
    heard: queue.Queue[Lost] = queue.Queue()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        host = f"127.0.0.1:{listening.getsockname()[1]}"
    way = Routes("0123456789abcdef/control", [Route(host, "direct", "token")])
    kept = Touch(way, Identity.create("ana", Identity.create("host").public), heard.put)
    thread = threading.Thread(target=kept.keep, daemon=True)
    thread.start()
    reason = heard.get(timeout=PATIENCE).reason
    kept.end()
    thread.join()
    assert reason.startswith("the host cannot be reached") and host in reason
