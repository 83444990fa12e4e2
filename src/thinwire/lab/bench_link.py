"""Measure a link between two real processes: goodput, CPU cost, bytes below the meter.

    python -m thinwire.lab.bench_link --mbps 80 --latency-ms 25

Both ends send as fast as the link takes, in both directions at once, over gRPC with mutual
TLS on the loopback interface. Each size gets a fresh pair of processes, so that CPU time
and the kernel's byte counts belong to it alone.
"""

import argparse
import collections
import dataclasses
import json
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from thinwire.errors import WireError
from thinwire.wire import (
    HEADER_BYTES,
    Authority,
    Frame,
    FrameKind,
    Identity,
    Link,
    LinkConfig,
    Listener,
    Meter,
    dial,
    socket_totals,
)

SIZES = (64 << 10, 1 << 20, 8 << 20)
_MAX_PAYLOAD = 64 << 20
_WAITING_BYTES = 4 << 20


@dataclass(frozen=True)
class Report:
    """What one end saw: the rate at which payload came in, and what it cost."""

    received_mbps: float
    payload_bytes_sent: int
    meter_bytes_sent: int
    kernel_bytes_sent: int
    cpu_seconds: float


@dataclass(frozen=True)
class Row:
    """One size and direction; CPU seconds are those of both ends per 10^9 payload bytes."""

    size: int
    direction: str
    mbps: float
    ratio: float
    meter_bytes: int
    kernel_bytes: int
    cpu_s_per_gb: float

    @property
    def overhead(self) -> float:
        """Bytes that TLS, HTTP/2 and gRPC added, as a share of what the meter counted."""
        return self.kernel_bytes / self.meter_bytes - 1 if self.meter_bytes else 0.0


class _End:
    """One end of the measured link: sends for some seconds and times what arrives."""

    def __init__(self, link: Link, meter: Meter, size: int) -> None:
        self._link = link
        self._meter = meter
        self._payload = bytes(range(256)) * (size // 256)
        self._arrivals: list[float] = []
        self._confirmed = threading.Event()
        self._failure: WireError | None = None
        link.start(self._on_frame, self._on_broken)

    def run(self, seconds: float) -> Report:
        """Send for `seconds`, wait until all of it is confirmed, and report."""
        cpu_before = time.process_time()
        self._send_for(seconds)
        self._link.send(Frame(FrameKind.TALLY))
        if not self._confirmed.wait(seconds + 60):
            raise WireError("the other end did not confirm what it received")
        if self._failure is not None:
            raise self._failure
        cpu_seconds = time.process_time() - cpu_before
        taken = self._arrivals[-1] - self._arrivals[0] if len(self._arrivals) > 1 else 0.0
        bits = (len(self._arrivals) - 1) * len(self._payload) * 8
        sent = self._meter.snapshot()["sent"]
        return Report(
            received_mbps=bits / taken / 1e6 if taken else 0.0,
            payload_bytes_sent=sent["total"]["payload_bytes"],
            meter_bytes_sent=self._meter.sent_bytes(),
            kernel_bytes_sent=sum(s.bytes_sent_once for s in socket_totals()),
            cpu_seconds=cpu_seconds,
        )

    def _send_for(self, seconds: float) -> None:
        # Enough messages wait at any moment to keep the link busy, and no more. A frame has
        # left when its span has ended; with emulation that lies in the future at first.
        most_waiting = max(3, _WAITING_BYTES // len(self._payload))
        leaves: collections.deque[float] = collections.deque()
        sent = left = 0
        until = time.monotonic() + seconds
        while (now := time.monotonic()) < until and self._failure is None:
            leaves.extend(end for *_, end in self._link.take_spans())
            while leaves and leaves[0] <= now:
                leaves.popleft()
                left += 1
            while sent - left < most_waiting:
                self._link.send(Frame(FrameKind.FORWARD, step=sent, payload=self._payload))
                sent += 1
            # Half of what waits may leave before the next look, which keeps looking cheap.
            middle = leaves[len(leaves) // 2] - now if leaves else 0.0
            time.sleep(min(max(middle, 0.002), 0.1))

    def _on_frame(self, frame: Frame) -> None:
        if frame.kind == FrameKind.FORWARD:
            self._arrivals.append(time.monotonic())
        elif frame.kind == FrameKind.TALLY:
            self._link.send(Frame(FrameKind.VERDICT))
        else:  # the verdict: everything sent has arrived, so the kernel has counted it
            self._confirmed.set()

    def _on_broken(self, error: WireError) -> None:
        self._failure = error
        self._confirmed.set()


def goodput(
    mbps: float,
    latency_ms: float,
    sizes: Sequence[int] = SIZES,
    seconds: float = 3.0,
) -> list[Row]:
    """Measure each size in both directions at once; `mbps` 0 measures the bare transport."""
    config = LinkConfig(mbps_up=mbps, mbps_down=mbps, latency_ms=latency_ms, emulate=mbps > 0)
    return [row for size in sizes for row in _measure(config, size, seconds)]


def _measure(config: LinkConfig, size: int, seconds: float) -> list[Row]:
    authority = Authority.create("bench")
    listener = Listener(authority.issue("here"), "127.0.0.1", 0, _MAX_PAYLOAD + HEADER_BYTES)
    order = {
        "identity": authority.issue("there").to_plain(),
        "address": listener.address,
        "config": dataclasses.asdict(config),
        "size": size,
        "seconds": seconds,
    }
    command = [sys.executable, "-P", "-m", "thinwire.lab.bench_link", "--other-end"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(order) + "\n")
        process.stdin.flush()
        meter = Meter()
        pipe = listener.accept("there", timeout=30)
        link = Link(pipe, meter, config.nic(), "here to there", _MAX_PAYLOAD)
        here = _End(link, meter, size).run(seconds)
        there = Report(**json.loads(process.stdout.readline()))
        process.stdin.close()
        link.close()
    listener.close()
    payload = here.payload_bytes_sent + there.payload_bytes_sent
    cpu_s_per_gb = (here.cpu_seconds + there.cpu_seconds) / payload * 1e9
    return [
        Row(
            size=size,
            direction=direction,
            mbps=receiver.received_mbps,
            ratio=receiver.received_mbps / config.mbps_up if config.mbps_up else 0.0,
            meter_bytes=sender.meter_bytes_sent,
            kernel_bytes=sender.kernel_bytes_sent,
            cpu_s_per_gb=cpu_s_per_gb,
        )
        for direction, sender, receiver in (("there", here, there), ("back", there, here))
    ]


def _other_end() -> None:
    order: dict[str, Any] = json.loads(sys.stdin.readline())
    identity = Identity.from_plain(order["identity"])
    config = LinkConfig(**order["config"])
    meter = Meter()
    pipe = dial(order["address"], "there", identity, "here", 30, _MAX_PAYLOAD + HEADER_BYTES)
    link = Link(pipe, meter, config.nic(), "there to here", _MAX_PAYLOAD)
    report = _End(link, meter, order["size"]).run(order["seconds"])
    print(json.dumps(dataclasses.asdict(report)), flush=True)
    sys.stdin.read()  # stay connected until the other side has read its own counts
    link.close()


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mbps", type=float, default=80.0)
    parser.add_argument("--latency-ms", type=float, default=25.0)
    parser.add_argument("--seconds", type=float, default=3.0, help="sending time of each size")
    parser.add_argument("--other-end", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.other_end:
        _other_end()
        return
    emulated = goodput(arguments.mbps, arguments.latency_ms, seconds=arguments.seconds)
    bare = goodput(0, 0, sizes=(1 << 20,), seconds=arguments.seconds)

    print_tables(emulated, bare, arguments.mbps, arguments.latency_ms)


def print_tables(emulated: list[Row], bare: list[Row], mbps: float, latency_ms: float) -> None:
    """Goodput and CPU cost, then the bytes of the meter beside those of the kernel."""
    print(f"goodput, both directions at once, {mbps:g} Mbit/s each way,", end=" ")
    print(f"{latency_ms:g} ms one way; last lines: without emulation")
    print(f"{'message':>10} {'direction':>9} {'Mbit/s':>8} {'of rate':>8} {'CPU s/GB':>9}")
    for row in emulated + bare:
        share = f"{row.ratio:.1%}" if row.ratio else "-"
        print(
            f"{row.size:>10} {row.direction:>9} {row.mbps:>8.1f} {share:>8} "
            f"{row.cpu_s_per_gb:>9.2f}"
        )
    print("\nbytes sent: frames as the meter counts them, and the kernel's TCP bytes")
    print(f"{'message':>10} {'direction':>9} {'meter':>13} {'kernel':>13} {'overhead':>9}")
    for row in emulated + bare:
        print(
            f"{row.size:>10} {row.direction:>9} {row.meter_bytes:>13} {row.kernel_bytes:>13} "
            f"{row.overhead:>9.3%}"
        )


if __name__ == "__main__":
    main()
