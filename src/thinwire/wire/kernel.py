"""What is asked of the kernel: byte counts of TCP sockets, and enough descriptors.

The meter counts frames; TLS, HTTP/2 and gRPC add their own bytes below it. The kernel sees
the sum, and this file reads it without touching the sockets, whoever owns them.
"""

import contextlib
import os
import socket
import struct
import sys
from dataclasses import dataclass
from typing import Any

# Places of four 64-bit counters in struct tcp_info (linux/tcp.h). The struct only ever
# grows at its end; the first two came with Linux 4.1, the others with 4.19.
_PLACES = {"bytes_acked": 120, "bytes_received": 128, "bytes_sent": 200, "bytes_retransmitted": 208}
_ENOUGH = 256
_DESCRIPTORS = 65536


@dataclass(frozen=True)
class SocketTotals:
    """One connected TCP socket: its ends, and the stream bytes the kernel moved for it.

    `bytes_sent` includes `bytes_retransmitted`; kernels before 4.19 count neither (None).
    `bytes_acked` is one too many on the side that connected, whose SYN the kernel counts.
    """

    local: str
    remote: str
    bytes_acked: int
    bytes_received: int
    bytes_sent: int | None
    bytes_retransmitted: int | None

    @property
    def bytes_sent_once(self) -> int:
        """Bytes sent without repetitions, to compare with the meter; 0 if not counted.

        Even the loopback interface repeats segments when the machine is busy.
        """
        return (self.bytes_sent or 0) - (self.bytes_retransmitted or 0)


def socket_totals() -> list[SocketTotals]:
    """Totals of each connected TCP socket of this process; empty where Linux is not below."""
    if not sys.platform.startswith("linux"):
        return []
    totals = []
    for entry in os.listdir("/proc/self/fd"):
        # The listing itself holds a descriptor that is gone by now, and other threads may
        # close theirs at any moment; such descriptors are simply passed over.
        try:
            if not os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                continue
            copy = os.dup(int(entry))
        except OSError:
            continue
        # Wrapping a copy: closing it leaves the owner's descriptor alone. Its blocking mode
        # is shared with the owner, so it must not be set here.
        with socket.socket(fileno=copy) as sock:
            found = _read(sock)
            if found is not None:
                totals.append(found)
    return totals


def raise_descriptor_limit() -> int:
    """Allow this process and its children as many open files as the system lets it; how many.

    The usual soft limit of 1,024 is meant for programs that use select, and is soon used up.
    """
    if sys.platform == "win32":
        return 0
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # some systems have a lower limit yet
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _read(sock: socket.socket) -> SocketTotals | None:
    if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
        return None
    try:
        remote = sock.getpeername()
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ENOUGH)
    except OSError:  # listening, or no longer connected
        return None
    if len(info) < _PLACES["bytes_received"] + 8:
        return None
    counts: dict[str, Any] = {
        name: struct.unpack_from("=Q", info, place)[0] if len(info) >= place + 8 else None
        for name, place in _PLACES.items()
    }
    local, remote = address_text(*sock.getsockname()[:2]), address_text(*remote[:2])
    return SocketTotals(local, remote, **counts)


def address_text(host: str, port: int) -> str:
    """An address as it is written and dialed: "10.0.0.1:80", "[::1]:80"."""
    # A dual-stack socket shows an IPv4 peer in IPv6 dress.
    host = host.removeprefix("::ffff:") if "." in host else host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
