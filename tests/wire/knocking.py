"""Callers at a door that are written by hand, and a service behind it."""

import socket
import time
from collections.abc import Callable

from thinwire.wire import Door
from thinwire.wire.preamble import proof_of, who_of
from waiting import PATIENCE

RUN, TOKEN = "0123456789abcdef", "the run's token"


class Service:
    """A TCP service of a test: each connection is kept for the test to use."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = "{}:{}".format(*self._socket.getsockname())

    def accept(self) -> socket.socket:
        self._socket.settimeout(PATIENCE)
        return with_patience(self._socket.accept()[0])

    def close(self) -> None:
        self._socket.close()


def with_patience(connection: socket.socket) -> socket.socket:
    connection.settimeout(PATIENCE)
    return connection


def knock(door: Door) -> socket.socket:
    return with_patience(socket.create_connection(("127.0.0.1", door.port)))


def line(connection: socket.socket) -> str:
    said = bytearray()
    while (byte := connection.recv(1)) not in (b"\n", b""):
        said += byte
    return said.decode()


def ask(door: Door, wish: str, name: str, token: str = TOKEN) -> socket.socket:
    """A caller that is written by hand, up to the answer."""
    caller = knock(door)
    magic, version, nonce = line(caller).split(" ")
    assert (magic, version) == ("thinwire-door", "2")
    proof = proof_of(token, nonce, wish, name)
    caller.sendall(f"{wish} {name} {who_of(token) or '-'} {proof}\n".encode())
    return caller


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
