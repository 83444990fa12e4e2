"""A peer that floods its stream to the host loses it, and is named; the host hears the others."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from thinwire.remote.lobby import Lobby
from thinwire.remote.messages import LOBBY, Doing, FromHost, lobby_name
from thinwire.run.control import Channel
from thinwire.run.pace import AT_ONCE

from thinwire.errors import WireError
from thinwire.remote.authority import AuthorityBook
from thinwire.wire import Identity, Listener, dial

PATIENCE = 30.0
MAX_MESSAGE = 1 << 20


def until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + PATIENCE
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


@pytest.fixture
def book(tmp_path: Path) -> AuthorityBook:
    return AuthorityBook(tmp_path / "authority", "test")


def enrolled(book: AuthorityBook, name: str) -> Identity:
    invite, identity = book.invite(["127.0.0.1:1"]), Identity.create(name, book.identity.public)
    book.enrol(invite.invite_id, invite.secret, identity.public, name)
    return identity


def test_a_flood_costs_a_peer_its_stream(book: AuthorityBook) -> None:
    peers = [enrolled(book, name) for name in ("ada", "bob")]
    listener = Listener(book.identity, "127.0.0.1", 0, MAX_MESSAGE, who=book.name_of)
    with contextlib.closing(listener), Lobby(listener, book) as lobby:
        streams = []
        for peer in peers:
            name = lobby_name(peer.name)
            pipe = dial(listener.address, name, peer, book.fingerprint, PATIENCE, MAX_MESSAGE)
            streams.append(Channel(pipe, name, FromHost, words=LOBBY))

        def guest(name: str):
            return next(guest for guest in lobby.guests() if guest.name == name)

        assert until(lambda: all(guest(peer.name).channel for peer in peers))
        with contextlib.suppress(WireError):
            for number in range(20 * AT_ONCE):
                streams[0].send(Doing(0, f"floods {number}"))
        assert until(lambda: guest("ada").is_unfit)
        assert "peer 'ada' sent 5" in guest("ada").why_unfit
        assert until(lambda: guest("ada").channel is None)
        streams[1].send(Doing(0, "fetches its stage"))
        assert until(lambda: guest("bob").doing == "fetches its stage")
        assert not guest("bob").is_unfit
