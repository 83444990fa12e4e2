"""The messages of an enrolment: JSON objects behind their length, bounded in size and in time."""

import contextlib
import json
import socket
import ssl
import struct
import threading
from collections.abc import Iterator
from typing import Any

from thinwire.errors import WireError

MOST_BYTES = 16 << 10  # of one message
_LENGTH = struct.Struct(">I")


def cut(connection: ssl.SSLSocket) -> None:
    """Break a connection on which another thread may be waiting."""
    with contextlib.suppress(OSError):
        # Not its own method, which ends encryption first: what is said then would be readable.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


@contextlib.contextmanager
def cut_off_after(seconds: float, connection: ssl.SSLSocket) -> Iterator[None]:
    """Break the connection after so long, however slowly its other end talks."""
    connection.settimeout(seconds)
    timer = threading.Timer(seconds, cut, [connection])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def send(connection: ssl.SSLSocket, message: dict[str, str]) -> None:
    """Send one message."""
    content = json.dumps(message).encode()
    connection.sendall(_LENGTH.pack(len(content)) + content)


def receive(connection: ssl.SSLSocket) -> dict[str, Any]:
    """Wait for one message; a WireError says what is wrong with it."""
    (size,) = _LENGTH.unpack(_receive_exactly(connection, _LENGTH.size))
    if size > MOST_BYTES:
        raise WireError(f"a message of enrolment has at most {MOST_BYTES:,} bytes")
    try:
        message = json.loads(_receive_exactly(connection, size))
    except (ValueError, RecursionError):
        raise WireError("a message of enrolment cannot be read") from None
    if not isinstance(message, dict):
        raise WireError("a message of enrolment cannot be read")
    return message


def _receive_exactly(connection: ssl.SSLSocket, size: int) -> bytes:
    content = b""
    while len(content) < size:
        part = connection.recv(size - len(content))
        if not part:
            raise WireError("the other end closed the connection before the enrolment was over")
        content += part
    return content
