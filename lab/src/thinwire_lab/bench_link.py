"""Measure a link between two real processes: goodput, CPU cost, bytes below the meter.

    python -m thinwire_lab.bench_link --mbps 80 --latency-ms 25

and, over a network that is really there, between two of its addresses:

    ip netns exec one python -m thinwire_lab.bench_link --mbps 80 --latency-ms 25 \\
        --real --listen 10.88.0.1 --other "ip netns exec two"

Both ends send as fast as the link takes, in both directions at once, over TLS.
Each size gets a fresh pair of processes, so that CPU time and the kernel's byte counts belong to it
alone. Then single frames are timed, each after the link was idle for two seconds.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import queue
import shlex
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from thinwire.errors import WireError
from thinwire.wire import (
    HEADER_BYTES,
    Frame,
    FrameKind,
    Identity,
    Link,
    LinkConfig,
    Listener,
    Meter,
    dial,
    emulated,
)

SIZES = (64 << 10, 1 << 20, 8 << 20)
_MAX_PAYLOAD = 64 << 20
_WAITING_BYTES = 4 << 20
_IDLE_S = 2.0
_SENT_AT = 200  # bytes_sent and bytes_retrans in struct tcp_info (linux/tcp.h)
_ALONE = 5  # frames of each size that are timed alone

Row = dict[str, Any]


@dataclass(frozen=True)
class Path:
    """Where the two ends are, and how the link between them is meant to behave.

    `other` are words before the command of the other end, such as those that put it into another
    network namespace. A real path is not emulated: rate and latency are only compared with.
    """

    mbps: float
    latency_ms: float
    listen: str = "127.0.0.1"
    other: str = ""
    real: bool = False

    @property
    def config(self) -> LinkConfig:
        """The link's settings."""
        emulate = self.mbps > 0 and not self.real
        return LinkConfig(
            mbps_up=self.mbps, mbps_down=self.mbps, latency_ms=self.latency_ms, emulate=emulate
        )

    def seconds(self, size: int) -> float:
        """How long a frame of this payload takes, by the model."""
        bits = (size + HEADER_BYTES) * 8
        return self.latency_ms / 1e3 + (bits / self.mbps / 1e6 if self.mbps else 0.0)


BARE = Path(0, 0)
"""The transport alone."""


class _End:
    """One end of the measured link: sends, notes when frames arrive, confirms when asked."""

    def __init__(self, link: Link) -> None:
        self.arrivals: list[float] = []
        self._link = link
        self._answers: queue.SimpleQueue[WireError | None] = queue.SimpleQueue()
        link.start(self._on_frame, self._answers.put)

    def send(self, payload: bytes) -> None:
        self._link.send(Frame(FrameKind.FORWARD, payload=payload))

    def confirm(self, timeout: float) -> None:
        """Wait until all that was sent has arrived, so that the kernel has counted it too."""
        self._link.send(Frame(FrameKind.TALLY))
        try:
            failure = self._answers.get(timeout=timeout)
        except queue.Empty:
            raise WireError("the other end did not confirm what it received") from None
        if failure is not None:
            raise failure

    def stream(self, size: int, seconds: float) -> dict[str, float]:
        """Send as fast as the link takes, until all of it has arrived; returns what it cost."""
        cpu_before = time.process_time()
        until, payload = time.monotonic() + seconds, bytes(range(256)) * (size // 256)
        while time.monotonic() < until:
            self.send(payload)  # enough frames wait to keep the link busy, and no more
            self._link.wait_for_room(max(3, _WAITING_BYTES // size))
        self.confirm(seconds + 60)
        return {
            "cpu_seconds": time.process_time() - cpu_before,
            "payload": self._link.meter.snapshot()["sent"]["total"]["payload_bytes"],
            "meter": self._link.meter.sent_bytes(),
            "kernel": _bytes_sent(),
        }

    def _on_frame(self, frame: Frame) -> None:
        if frame.kind is FrameKind.FORWARD:
            self.arrivals.append(time.monotonic())
        elif frame.kind is FrameKind.TALLY:
            self._link.send(Frame(FrameKind.VERDICT))
        else:  # the verdict
            self._answers.put(None)


def goodput(path: Path, sizes: Sequence[int] = SIZES, seconds: float = 3.0) -> list[Row]:
    """Both directions at once, for each size; a rate of 0 measures the bare transport."""
    rows: list[Row] = []
    for size in sizes:
        with _two_ends(path, size, seconds) as (end, finish):
            here = end.stream(size, seconds)
            there = finish()
        cpu_seconds = here["cpu_seconds"] + there["cpu_seconds"]
        both = ("there", here, there["arrivals"]), ("back", there, end.arrivals)
        for direction, sent, (first, *others) in both:
            mbps = len(others) * size * 8 / (others[-1] - first) / 1e6 if others else 0.0
            rows.append(
                {
                    "size": size,
                    "direction": direction,
                    "mbps": mbps,
                    "ratio": mbps / path.mbps if path.mbps else None,
                    "cpu_s_per_gb": cpu_seconds / (here["payload"] + there["payload"]) * 1e9,
                    "meter_bytes": sent["meter"],
                    "kernel_bytes": sent["kernel"],
                    "overhead": sent["kernel"] / sent["meter"] - 1,
                }
            )
    return rows


def alone(path: Path, sizes: Sequence[int] = SIZES, times: int = _ALONE) -> dict[int, float]:
    """Median seconds of a single frame of each size, one way, after the link was idle.

    Both ends read one clock, so they are on one machine.
    """
    taken: dict[int, list[float]] = {size: [] for size in sizes}
    sent = []
    with _two_ends(path) as (end, finish):
        for size in [size for size in sizes for _ in range(times)]:
            time.sleep(_IDLE_S)
            sent.append((size, time.monotonic()))
            end.send(bytes(size))
            end.confirm(path.seconds(size) + 60)
        arrivals = finish()["arrivals"]
    for (size, start), arrived in zip(sent, arrivals, strict=True):
        taken[size].append(arrived - start)
    return {size: statistics.median(seconds) for size, seconds in taken.items()}


@contextlib.contextmanager
def _two_ends(
    path: Path, size: int = 0, seconds: float = 0.0
) -> Iterator[tuple[_End, Callable[[], dict[str, Any]]]]:
    """This end, and a call that returns what the other one found; that one streams too."""
    identity, other = Identity.create("here"), Identity.create("there")
    words = [*shlex.split(path.other), sys.executable, "-P", "-m", "thinwire_lab.bench_link"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    listener = Listener(identity, path.listen, 0, _MAX_PAYLOAD + HEADER_BYTES)
    with (
        contextlib.closing(listener),
        subprocess.Popen([*words, "--other-end"], **pipes) as process,
    ):
        order = {
            "identity": dataclasses.asdict(other),
            "whom": identity.fingerprint,
            "address": listener.address,
            "config": dataclasses.asdict(path.config),
            "work": {"size": size, "seconds": seconds},
        }
        print(json.dumps(order), file=process.stdin, flush=True)
        pipe = listener.accept("there", timeout=30)

        def finish() -> dict[str, Any]:
            print(file=process.stdin, flush=True)
            return json.loads(process.stdout.readline())  # type: ignore[union-attr]

        link = Link(emulated(pipe, path.config.nic()), Meter(), "here to there", _MAX_PAYLOAD)
        with contextlib.closing(link):
            yield _End(link), finish


def _bytes_sent() -> int:
    """Stream bytes that left the TCP sockets of this process, as Linux counts them; else 0."""
    counts: dict[tuple[Any, Any], int] = {}  # by both ends: descriptors may share a connection
    for entry in os.listdir("/proc/self/fd") if sys.platform.startswith("linux") else ():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(entry))) as copy:
            info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            sent, again = struct.unpack_from("=QQ", info, _SENT_AT)
            counts[copy.getsockname(), copy.getpeername()] = sent - again
    return sum(counts.values())


def _other_end() -> None:
    order: dict[str, Any] = json.loads(sys.stdin.readline())
    identity, limit = Identity(**order["identity"]), _MAX_PAYLOAD + HEADER_BYTES
    dialed = dial(order["address"], "there", identity, order["whom"], 30, limit)
    pipe = emulated(dialed, LinkConfig(**order["config"]).nic())
    with contextlib.closing(Link(pipe, Meter(), "there to here", _MAX_PAYLOAD)) as link:
        end = _End(link)
        found = end.stream(**order["work"])
        sys.stdin.readline()  # until the first end has sent all, and read its own counts
        print(json.dumps({**found, "arrivals": end.arrivals}), flush=True)


def show(rows: list[Row]) -> None:
    """Print a table."""
    from thinwire_lab.outcome import markdown_table  # not above: the other end needs no torch

    print(f"{markdown_table(rows)}\n", flush=True)


def show_goodput(path: Path, sizes: Sequence[int] = SIZES, seconds: float = 3.0) -> list[Row]:
    """Measure a path and print what was found."""
    rate = f"at {path.mbps:g} Mbit/s each way" if path.mbps else "without emulation"
    print(f"goodput {rate}, {path.latency_ms:g} ms one way, both directions at once; overhead:")
    print("the kernel's TCP bytes beyond the frames that the meter counts\n", flush=True)
    rows = goodput(path, sizes, seconds)
    show(rows)
    return rows


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mbps", type=float, default=80.0)
    parser.add_argument("--latency-ms", type=float, default=25.0)
    parser.add_argument("--seconds", type=float, default=3.0, help="sending time of each size")
    parser.add_argument("--listen", default="127.0.0.1", help="address of this end")
    parser.add_argument("--other", default="", help="words before the command of the other end")
    parser.add_argument("--real", action="store_true", help="the path is real: do not emulate it")
    parser.add_argument("--other-end", action="store_true", help=argparse.SUPPRESS)
    options = vars(parser.parse_args())
    if options.pop("other_end"):
        _other_end()
        return
    seconds = options.pop("seconds")
    path = Path(**options)
    show_goodput(path, seconds=seconds)
    if not path.real:
        show_goodput(BARE, (1 << 20,), seconds)
    print(f"a single frame after {_IDLE_S:g} s of idling, one way, median of {_ALONE}\n")
    show([
        {"size": size, "ms": taken * 1e3, "model ms": path.seconds(size) * 1e3}
        for size, taken in alone(path).items()
    ])  # fmt: skip


if __name__ == "__main__":
    main()
