"""How long one message takes after a silence, by TCP's congestion control; plain sockets."""

import json
import socket
import statistics
import struct
import subprocess
import sys
import time
from typing import Any

from wan_network import Wan, open_network

SIZES = (16 << 10, 64 << 10, 256 << 10, 1 << 20)
TIMES, SILENCE_S = 3, 1.5
_PORT = 4619
_HEAD = struct.Struct("dI")  # when it was sent, by a clock that all nodes share; its size


def bench_bursts(wan: Wan) -> list[dict[str, Any]]:
    """Milliseconds from the first byte sent to the last received, the median of three."""
    rows: list[dict[str, Any]] = []
    for control in ("bbr", "cubic", "reno"):
        with open_network(2, wan) as network:
            script = [sys.executable, __file__]
            receiver = subprocess.Popen(
                [*network.prefix(1), *script, "receive", network.address(1)],
                stdout=subprocess.PIPE,
                text=True,
            )
            assert receiver.stdout is not None
            receiver.stdout.readline()  # it listens
            sender = [*network.prefix(2), *script, "send", network.address(1), control]
            subprocess.run(sender, check=True)
            found = json.loads(receiver.communicate()[0])
        for size in SIZES:
            taken = statistics.median(ms for sent, ms in found if sent == size)
            model = wan.latency_ms + size * 8 / (wan.mbps * 1e3)
            rows.append({"by": control, "size": size, "ms": taken, "model ms": model})
    return rows


def receive(host: str) -> None:
    """Inside a node: note how long each message took."""
    found = []
    with socket.create_server((host, _PORT)) as server:
        print("ready", flush=True)
        connection = server.accept()[0]
    while head := connection.recv(_HEAD.size, socket.MSG_WAITALL):
        sent, size = _HEAD.unpack(head)
        left = size
        while left:
            left -= len(connection.recv(min(left, 1 << 18)))
        found.append((size, (time.monotonic() - sent) * 1e3))
    print(json.dumps(found))


def send(host: str, control: str) -> None:
    """Inside a node: send messages of each size, each after a silence."""
    with socket.create_connection((host, _PORT)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, control.encode())
        for size in [size for size in SIZES for _ in range(TIMES)]:
            time.sleep(SILENCE_S)
            connection.sendall(_HEAD.pack(time.monotonic(), size) + bytes(size))


if __name__ == "__main__":
    {"receive": receive, "send": send}[sys.argv[1]](*sys.argv[2:])
