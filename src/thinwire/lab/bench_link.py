"""Measure a link between two real processes: goodput, CPU cost, bytes below the meter.

    python -m thinwire.lab.bench_link --mbps 80 --latency-ms 25

and, over a network that is really there, between two of its addresses:

    ip netns exec one python -m thinwire.lab.bench_link --mbps 80 --latency-ms 25 \\
        --real --listen 10.88.0.1 --other "ip netns exec two"

Both ends send as fast as the link takes, in both directions at once, over gRPC with mutual
TLS on the loopback interface. Each size gets a fresh pair of processes, so that CPU time
and the kernel's byte counts belong to it alone. Then single frames are timed, each after the link
was idle for two seconds.
"""

import argparse
import collections
import contextlib
import dataclasses
import json
import math
import shlex
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
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
_IDLE_S = 2.0
_ALONE = 5  # frames of each size that are timed alone


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
        return LinkConfig(
            mbps_up=self.mbps,
            mbps_down=self.mbps,
            latency_ms=self.latency_ms,
            emulate=self.mbps > 0 and not self.real,
        )

    def seconds(self, size: int) -> float:
        """How long a frame of this payload takes, by the model."""
        bits = (size + HEADER_BYTES) * 8
        return self.latency_ms / 1e3 + (bits / self.mbps / 1e6 if self.mbps else 0.0)


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


class _Echo:
    """The end that times single frames, or the one that confirms each of them."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._arrivals: list[float] = []
        self._changed = threading.Condition()
        link.start(self._on_frame, lambda error: self._note(math.nan))

    def send_alone(self, sizes: Sequence[int]) -> list[float]:
        """When each frame was sent; the next one follows a pause after its confirmation."""
        sent = []
        for number, size in enumerate(sizes, 1):
            time.sleep(_IDLE_S)
            sent.append(time.monotonic())
            self._link.send(Frame(FrameKind.FORWARD, payload=bytes(size)))
            self.wait_for(number)
        return sent

    def wait_for(self, count: int) -> list[float]:
        """The times at which so many frames have come."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._arrivals) >= count)
            return self._arrivals

    def _on_frame(self, frame: Frame) -> None:
        self._note(time.monotonic())
        if frame.kind is FrameKind.FORWARD:
            self._link.send(Frame(FrameKind.TALLY))

    def _note(self, now: float) -> None:
        with self._changed:
            self._arrivals.append(now)
            self._changed.notify_all()


def goodput(
    mbps: float,
    latency_ms: float,
    sizes: Sequence[int] = SIZES,
    seconds: float = 3.0,
) -> list[Row]:
    """Measure each size in both directions at once; `mbps` 0 measures the bare transport."""
    path = Path(mbps, latency_ms)
    return [row for size in sizes for row in measure(path, size, seconds)]


def alone(path: Path, sizes: Sequence[int] = SIZES, times: int = _ALONE) -> dict[int, float]:
    """Median seconds of a single frame of each size, one way, after the link was idle.

    Both ends read one clock, so they are on one machine.
    """
    order = [size for size in sizes for _ in range(times)]
    with _other_process(path, {"alone": len(order)}) as (link, process):
        sent = _Echo(link).send_alone(order)
        assert process.stdout is not None
        arrived = json.loads(process.stdout.readline())
    taken = [there - here for here, there in zip(sent, arrived, strict=True)]
    return {
        size: statistics.median(t for t, s in zip(taken, order, strict=True) if s == size)
        for size in sizes
    }


@contextlib.contextmanager
def _other_process(
    path: Path, task: dict[str, Any]
) -> Iterator[tuple[Link, subprocess.Popen[str]]]:
    """A link to another process that has been given its task."""
    authority = Authority.create("bench")
    listener = Listener(authority.issue("here"), path.listen, 0, _MAX_PAYLOAD + HEADER_BYTES)
    order = {
        "identity": authority.issue("there").to_plain(),
        "address": listener.address,
        "config": dataclasses.asdict(path.config),
        **task,
    }
    module = [sys.executable, "-P", "-m", "thinwire.lab.bench_link", "--other-end"]
    with subprocess.Popen(
        [*shlex.split(path.other), *module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        process.stdin.write(json.dumps(order) + "\n")
        process.stdin.flush()
        pipe = listener.accept("there", timeout=30)
        link = Link(pipe, Meter(), path.config.nic(), "here to there", _MAX_PAYLOAD)
        yield link, process
        process.stdin.close()
        link.close()
    listener.close()


def measure(path: Path, size: int, seconds: float) -> list[Row]:
    """Goodput of one size in both directions at once, and what it costs."""
    config = path.config
    with _other_process(path, {"size": size, "seconds": seconds}) as (link, process):
        here = _End(link, link.meter, size).run(seconds)
        assert process.stdout is not None
        there = Report(**json.loads(process.stdout.readline()))
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
    pipe = dial(order["address"], "there", identity, "here", 30, _MAX_PAYLOAD + HEADER_BYTES)
    link = Link(pipe, Meter(), config.nic(), "there to here", _MAX_PAYLOAD)
    if "alone" in order:
        print(json.dumps(_Echo(link).wait_for(order["alone"])), flush=True)
    else:
        report = _End(link, link.meter, order["size"]).run(order["seconds"])
        print(json.dumps(dataclasses.asdict(report)), flush=True)
    sys.stdin.read()  # stay connected until the other side has read its own counts
    link.close()


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
    arguments = parser.parse_args()
    if arguments.other_end:
        _other_end()
        return
    path = Path(
        arguments.mbps, arguments.latency_ms, arguments.listen, arguments.other, arguments.real
    )
    rows = [row for size in SIZES for row in measure(path, size, arguments.seconds)]
    bare = [] if path.real else goodput(0, 0, sizes=(1 << 20,), seconds=arguments.seconds)
    print_tables(rows, bare, path.mbps, path.latency_ms)
    print_alone(path, alone(path))


def print_alone(path: Path, taken: dict[int, float]) -> None:
    """Single frames beside what the model says of them."""
    print(f"\na single frame after {_IDLE_S:g} s of idling, one way, median of {_ALONE}")
    print(f"{'message':>10} {'ms':>8} {'model ms':>9} {'of model':>9}")
    for size, seconds in taken.items():
        model = path.seconds(size)
        share = f"{seconds / model:.1%}" if model else "-"
        print(f"{size:>10} {seconds * 1e3:>8.1f} {model * 1e3:>9.1f} {share:>9}")


def print_tables(emulated: list[Row], bare: list[Row], mbps: float, latency_ms: float) -> None:
    """Goodput and CPU cost, then the bytes of the meter beside those of the kernel."""
    print(f"goodput, both directions at once, {mbps:g} Mbit/s each way,", end=" ")
    print(f"{latency_ms:g} ms one way" + ("; last lines: without emulation" if bare else ""))
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
