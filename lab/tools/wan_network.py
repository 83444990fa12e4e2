"""Machines with slow links inside one Linux machine: network namespaces, joined by an emulated WAN.

Each node is a namespace with one card, `wan0` at 10.88.0.N, whose rate up and down is bounded and
whose packets take a while. Needs root, `ip`, and one of

- netem in the kernel (`tc qdisc add ... netem`), which adds delay and bounds rates, or
- a program that does the same in user space (`--wan PROGRAM`). It is called with Mbit/s, one-way
  milliseconds, milliseconds of queue, lost packets in a million and the names of the namespaces,
  sets up `wan0` in each as above, and carries packets until it is told to end.
"""

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_PREFIX, _HUB = "thinwire-", "thinwire-hub"
_PACKET_BITS = 1500 * 8


@dataclass(frozen=True)
class Wan:
    """How the links behave: of each node, up and down, and one way between any two."""

    mbps: float = 80.0
    latency_ms: float = 25.0
    queue_ms: float = 50.0
    program: Path | None = None


class Network:
    """Nodes 1 to N, for as long as `open_network` lasts."""

    def __init__(self, count: int) -> None:
        self.nodes = range(1, count + 1)

    def address(self, node: int) -> str:
        """Of a node, on the WAN."""
        return f"10.88.0.{node}"

    def prefix(self, node: int) -> list[str]:
        """Words before a command that put it into a node."""
        return ["ip", "netns", "exec", f"{_PREFIX}{node}"]


@contextlib.contextmanager
def open_network(count: int, wan: Wan) -> Iterator[Network]:
    """Make the nodes and their WAN; nothing is left of them afterwards."""
    _check_means(wan)
    network = Network(count)
    names = [f"{_PREFIX}{node}" for node in network.nodes]
    with contextlib.ExitStack() as held:
        for name in [_HUB, *names]:
            _ip("netns", "add", name)
            held.callback(subprocess.run, ["ip", "netns", "del", name], check=False)
            _ip("-n", name, "link", "set", "lo", "up")
        if wan.program is None:
            _join_by_netem(network, wan)
        else:
            held.enter_context(_joined_by_program(names, wan, wan.program))
        yield network


def _check_means(wan: Wan) -> None:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        raise SystemExit("namespaces need root and the command `ip` (package iproute2)")
    if wan.program is None and not _has_netem():
        raise SystemExit(
            "this kernel has no netem, which delays packets: load it (modprobe sch_netem), or give "
            "a program that carries packets in user space (--wan PROGRAM)"
        )


def _has_netem() -> bool:
    _ip("netns", "add", _HUB)
    try:
        words = ["tc", "-n", _HUB, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]
        return (
            shutil.which("tc") is not None
            and not subprocess.run(words, capture_output=True).returncode
        )
    finally:
        _ip("netns", "del", _HUB)


def _join_by_netem(network: Network, wan: Wan) -> None:
    """A bridge in a namespace of its own; netem at both ends of each node's cable."""
    _ip("-n", _HUB, "link", "add", "bridge", "type", "bridge")
    _ip("-n", _HUB, "link", "set", "bridge", "up")
    rate = f"{wan.mbps:g}mbit"
    # Packets that netem holds: those on their way, and those that queue for the rate.
    held = round(wan.mbps * 1e3 * (wan.latency_ms + wan.queue_ms) / _PACKET_BITS)
    queued = max(2, round(wan.mbps * 1e3 * wan.queue_ms / _PACKET_BITS))
    for node in network.nodes:
        name, port = f"{_PREFIX}{node}", f"port{node}"
        _ip("-n", name, "link", "add", "wan0", "type", "veth", "peer", "name", port, "netns", _HUB)
        _ip("-n", name, "address", "add", f"{network.address(node)}/24", "dev", "wan0")
        _ip("-n", name, "link", "set", "wan0", "up")
        _ip("-n", _HUB, "link", "set", port, "master", "bridge", "up")
        delay = ["delay", f"{wan.latency_ms:g}ms", "rate", rate, "limit", str(held)]
        _tc("-n", name, "qdisc", "add", "dev", "wan0", "root", "netem", *delay)
        down = ["rate", rate, "limit", str(queued)]
        _tc("-n", _HUB, "qdisc", "add", "dev", port, "root", "netem", *down)


@contextlib.contextmanager
def _joined_by_program(names: Sequence[str], wan: Wan, program: Path) -> Iterator[None]:
    figures = [f"{figure:g}" for figure in (wan.mbps, wan.latency_ms, wan.queue_ms, 0)]
    process = subprocess.Popen([str(program.resolve()), *figures, *names])
    try:
        deadline = time.monotonic() + 10
        while "10.88.0." not in _ip("-n", names[-1], "address"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{program} did not set up wan0 in {names[-1]}")
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        process.wait()


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


def _tc(*words: str) -> None:
    subprocess.run(["tc", *words], check=True)
