"""Callers at a door that are written by hand, and a service behind it."""

import queue
import socket

from thinwire.wire.door import proof_of, who_of
from thinwire.wire.sockets import ListeningPort
from waiting import PATIENCE, wait_until

RUN, TOKEN = "0123456789abcdef", "the run's token"


class Service:
    """A service of a test, behind a door or on a port: each connection is kept to be used."""

    def __init__(self):
        self._taken: queue.Queue[socket.socket] = queue.Queue()
        self._port = ListeningPort("127.0.0.1", 0, self.take)
        self.address = self._port.address

    def take(self, connection, comes_from):
        self._taken.put(connection)
        wait_until(lambda: connection.fileno() < 0, 3600)

    def accept(self):
        return with_patience(self._taken.get(timeout=PATIENCE))

    def close(self):
        self._port.close()


def with_patience(connection):
    connection.settimeout(PATIENCE)
    return connection


def knock(door):
    return with_patience(socket.create_connection(("127.0.0.1", door.port)))


def line(connection):
    said = bytearray()
    while (byte := connection.recv(1)) not in (b"\n", b""):
        said += byte
    return said.decode()


def ask(door, wish, name, token=TOKEN):
    """A caller that is written by hand, up to the answer."""
    caller = knock(door)
    magic, version, nonce = line(caller).split(" ")
    assert (magic, version) == ("thinwire-door", "3")
    proof = proof_of(token, nonce, wish, name)
    caller.sendall(f"{wish} {name} {who_of(token) or '-'} {proof}\n".encode())
    return caller
