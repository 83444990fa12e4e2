"""TCP sockets as the wire uses them: addresses, connections, listening, enough descriptors."""

import contextlib
import os
import re
import resource
import socket
import sys
import time
from collections.abc import Callable
from functools import partial

from thinwire.background import on_daemon_thread
from thinwire.errors import WireError, printable

_KEEPALIVE = 15, 5, 3  # seconds of silence, seconds between probes, probes
_DESCRIPTORS = 65536  # the usual soft limit of 1,024 is meant for programs that use select


def address_text(host: str, port: int) -> str:
    """An address as it is written and dialed: "10.0.0.1:80", "[::1]:80"."""
    # A dual-stack socket shows an IPv4 peer in IPv6 dress.
    host = host.removeprefix("::ffff:") if "." in host else host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "10.0.0.1:80" or "[::1]:80"."""
    host, _, port = address.rpartition(":")
    if not host or not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
        raise WireError(f"{printable(address, 100)!r} is not an address: write HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)


def connect(address: str, timeout: float) -> socket.socket:
    """A TCP connection to a host and port; a WireError says why there is none to be had."""
    try:
        connection = socket.create_connection(split_address(address), timeout)
    except TimeoutError:
        raise WireError(f"{address}: no answer within {timeout:.3g} s") from None
    except UnicodeError:  # Python encodes names before it looks them up
        raise WireError(f"{printable(address, 100)!r} does not name a machine") from None
    except OSError as error:
        raise WireError(f"{address}: {why(error)}") from None
    prepare(connection)
    return connection


def prepare(connection: socket.socket) -> None:
    """Small messages at once, and silence noticed: what every connection of ours is set to. After a
    quiet moment TCP's usual congestion control starts slowly again; BBR does not.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    idle = "TCP_KEEPALIVE" if sys.platform == "darwin" else "TCP_KEEPIDLE"
    for name, value in zip((idle, "TCP_KEEPINTVL", "TCP_KEEPCNT"), _KEEPALIVE, strict=True):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    with contextlib.suppress(OSError, AttributeError):  # Linux alone has it, and may not allow it
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")


def why(error: OSError) -> str:
    """The system's own words."""
    if error.errno is None or error.errno < 0 or isinstance(error, socket.gaierror):
        return error.strerror or str(error)
    return os.strerror(error.errno)


class ListeningPort:
    """Listens on a port; `receive` gets each connection, and its host, on a thread of its own."""

    def __init__(
        self, host: str, port: int, receive: Callable[[socket.socket, str], object]
    ) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._socket = socket.create_server(
                (host, port), family=family, backlog=128, dualstack_ipv6=host == "::"
            )
        except OSError as error:
            raise WireError(
                f"cannot listen on port {port} of {host or 'all addresses'}: {why(error)}; name an "
                "address of this machine (link.listen, or --listen HOST:PORT), and a port that "
                "this user may open and no other process has, or 0 for any free one"
            ) from None
        host, self.number = self._socket.getsockname()[:2]
        self.address = address_text(host, self.number)
        on_daemon_thread("thinwire accept", lambda: self._accept(receive))

    def close(self) -> None:
        """Free the port."""
        hang_up(self._socket)
        self._socket.close()

    def _accept(self, receive: Callable[[socket.socket, str], object]) -> None:
        while True:
            try:
                connection, place = self._socket.accept()
                prepare(connection)
            except OSError:
                if self._socket.fileno() < 0:
                    return
                time.sleep(0.1)  # out of descriptors, perhaps: some will be given back
                continue
            host, _ = split_address(address_text(*place[:2]))
            on_daemon_thread("thinwire connection", partial(receive, connection, host))


def hang_up(connection: socket.socket) -> None:
    """End a connection on which other threads may be waiting; they wake up and let go of it."""
    with contextlib.suppress(OSError):
        # Not the own method of a TLS socket, which ends encryption first.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def raise_descriptor_limit() -> None:
    """Allow this process and its children as many open files as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # some systems have a lower limit yet
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
