"""A link: frames between two neighbouring stages, sent without making compute wait.

Before the first frame each end says who it is and what it runs (`handshake`). Then `send` only
queues. Packing, checksumming and writing happen on the link's own threads:

    send() -> queue -> packing thread -> pipe
    pipe -> reading thread -> on_frame

A link ends in good order, when one end sends BYE after everything it had queued, or it is broken,
which is reported once to `on_broken` with the reason.
"""

import collections
import json
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from thinwire.background import on_daemon_thread
from thinwire.errors import BreachError, WireError, printable
from thinwire.typed import option
from thinwire.wire.frame import HEADER_BYTES, Frame, FrameKind, Meter, decode, encode
from thinwire.wire.pipe import CLOSE_GRACE_S, Nic, Pipe

Span = tuple[str, int, int, float, float]

Remedy = Callable[[str, Any, Any], str]  # (key, ours, theirs) -> what to do about it, or nothing

MAX_SPANS = 65536
_LAST_WORD_S = 2.0  # after a failed write, to hear whether the other end said goodbye before
_FOREVER_S = 1e9
MAX_HELLO = 1 << 16
SLOWEST_MBPS = 1e-3  # below it no run ends
LONGEST_DELAY_MS = 3.6e6  # an hour: nothing that is called a link is slower
_option = partial(option, scope="machine")


@dataclass(frozen=True)
class LinkConfig:
    """The network between stages: its emulated rates, and where stages listen."""

    mbps_up: float = _option(
        80.0, "uplink rate of each host in Mbit/s; 0 = unlimited", least=SLOWEST_MBPS, auto=0
    )
    mbps_down: float = _option(
        80.0, "downlink rate of each host in Mbit/s; 0 = unlimited", least=SLOWEST_MBPS, auto=0
    )
    latency_ms: float = _option(
        25.0, "one-way delay of each link in milliseconds", most=LONGEST_DELAY_MS
    )
    jitter_ms: float = _option(
        0.0, "maximum extra random delay of a message in milliseconds", most=LONGEST_DELAY_MS
    )
    emulate: bool = _option(True, "emulate these rates and delays; false = no delays")
    listen: str = _option("127.0.0.1", "address on which stages accept links")
    outage: float = _option(
        60.0,
        "seconds for which a link may be down before the run ends; 0 = end it at the first loss",
    )
    shard_share: float = _option(
        0.25,
        "share of a peer's uplink that checkpoints may take on their way to the host",
        above=0,
        most=1,
    )

    def nic(self, seed: int = 0) -> Nic | None:
        """The emulated network card of one host, or None when messages are not held back."""
        if not self.emulate:
            return None
        return Nic(self.mbps_up, self.mbps_down, self.latency_ms, self.jitter_ms, seed)


def handshake(
    pipe: Pipe,
    mine: dict[str, Any],
    expect: dict[str, Any],
    timeout: float,
    meter: Meter | None = None,
    remedy: Remedy = lambda key, mine, theirs: "",
) -> dict[str, Any]:
    """Exchange one HELLO each way on a bare pipe; returns what the other end said of itself. Every
    key of `expect` must have the same value at the other end; else one WireError names all
    differences and what mends them, and the pipe is closed.
    """
    meter = meter or Meter()
    try:
        payload = json.dumps(mine, sort_keys=True).encode()
        pipe.write(encode(Frame(FrameKind.HELLO, payload=payload)))
        meter.count_sent(FrameKind.HELLO, len(payload))
        message = pipe.read_within(timeout)
        if message is None:
            raise WireError("the other end closed the link; its own message says why")
        hello = decode(message, MAX_HELLO)
        if hello.kind != FrameKind.HELLO:
            raise WireError(f"expected HELLO first, got {hello.kind.name}")
        meter.count_received(FrameKind.HELLO, len(hello.payload))
        try:
            theirs = msgspec.json.decode(hello.payload, type=dict[str, Any])
        except (msgspec.MsgspecError, RecursionError) as error:
            why = printable(str(error), 200)
            raise WireError(f"the other end's HELLO is not a JSON object: {why}") from None
        differences = []
        for key, wanted in expect.items():
            difference = f"{key}: this stage has {wanted}, the other end "
            if key not in theirs:
                differences.append(f"{difference}does not say")
            elif theirs[key] != wanted:
                cure = printable(remedy(key, wanted, theirs[key]), 300)
                said = printable(str(theirs[key]), 200)
                differences.append(f"{difference}has {said}{f' ({cure})' if cure else ''}")
        if differences:
            raise WireError("the two ends do not match: " + "; ".join(differences))
        return theirs
    except WireError as error:
        # Aside, because closing lets the other end read our HELLO first, and it may not be.
        on_daemon_thread("handshake", pipe.close)
        # Whatever it was: before both ends have agreed, no fault is the other end's alone.
        raise WireError(f"handshake: {error}") from error


class Link:
    """Frames to and from one neighbour, metered; one that comes has at most `max_payload` bytes."""

    def __init__(self, pipe: Pipe, meter: Meter, name: str, max_payload: int) -> None:
        self.name, self.meter, self.pipe = name, meter, pipe
        self.other_end_lost = False  # broken, and not by a fault in this process
        self.other_end_at_fault = False  # broken, for it sent what the contract forbids
        self._max_payload = max_payload
        self._spans: collections.deque[Span] = collections.deque(maxlen=MAX_SPANS)
        self._outgoing: queue.SimpleQueue[Frame | Callable[[], Frame] | None] = queue.SimpleQueue()
        self._state = threading.Condition()
        self.unsent = 0  # handed to `send`, and not yet to the pipe
        self._leaving: collections.deque[float] = collections.deque()  # when others leave
        self._closing = False
        self._said_bye = False  # the other end did
        self._failure: WireError | None = None

    def start(
        self,
        on_frame: Callable[[Frame], None],
        on_broken: Callable[[WireError], None],
        on_end: Callable[[], object] = lambda: None,
    ) -> None:
        """Begin to move frames; callbacks run on the link's threads. `on_frame` gets each frame but
        BYE, for which there is `on_end`. If it raises, the link is broken; a WireError says that
        the frame is not what was agreed, and `on_broken` gets a BreachError.
        """
        self._on_frame, self._on_broken, self._on_end = on_frame, on_broken, on_end
        for loop, work in ((self._send_loop, "packing"), (self._read_loop, "reading")):
            threading.Thread(target=loop, name=f"{self.name} {work}", daemon=True).start()

    def send(self, item: Frame | Callable[[], Frame]) -> None:
        """Queue a frame, or a function that packs one on the sending thread; never blocks.
        WireError if the link is closed, broken, or left by the other end.
        """
        with self._state:
            if self._closing or self._lost():
                reason = self._failure or "the other end said goodbye"
                reason = "it was closed here" if self._closing else reason
                raise WireError(f"link {self.name} takes no more frames: {reason}")
            self._queue(item)

    def wait_for_room(self, frames: int, timeout: float | None = None) -> None:
        """Wait until fewer than so many have to leave (an emulated uplink, too), or it is lost."""
        until = time.monotonic() + (_FOREVER_S if timeout is None else timeout)
        with self._state:
            while self._to_leave() >= frames and not self._lost() and time.monotonic() < until:
                next_end = self._leaving[0] if self._leaving else until
                self._state.wait(min(next_end, until) - time.monotonic())

    def close(self, timeout: float | None = 10.0) -> None:
        """Send what is queued and a BYE, then close the pipe; never raises, and reports no loss.
        What is not sent within `timeout` seconds is dropped; None drops nothing while the link
        holds.
        """
        with self._state:
            if self._closing:
                return
            if not self._lost():
                self._queue(Frame(FrameKind.BYE))
            self._closing = True
            self.wait_for_room(1, timeout)
        self._outgoing.put(None)
        self.pipe.close(None if timeout is None else CLOSE_GRACE_S)

    def take_spans(self) -> list[Span]:
        """(kind, step, microbatch, start, end) of each frame sent since the last call: when it
        occupied the emulated uplink or, without emulation, the transport's write. Waits until all
        that was handed to `send` is billed and has its place there, or the link is lost.
        """
        with self._state:
            self._state.wait_for(lambda: not self.unsent or self._lost())
        return [self._spans.popleft() for _ in range(len(self._spans))]

    def _queue(self, item: Frame | Callable[[], Frame]) -> None:
        self.unsent += 1
        self._outgoing.put(item)

    def _send_loop(self) -> None:
        while (item := self._outgoing.get()) is not None and not self._lost():
            try:
                frame = item if isinstance(item, Frame) else item()
                message = encode(frame)
            except Exception as error:  # whatever packing raised belongs to the run, not to us
                self._break(error, "packing a frame")
                return
            try:
                span = self.pipe.send(message)
            except WireError as error:
                with self._state:
                    # The reading thread knows better why: perhaps a BYE came just before.
                    self._state.wait_for(self._lost, _LAST_WORD_S)
                self._break(error)
                return
            with self._state:
                if span is not None:
                    self.meter.count_sent(frame.kind, len(message) - HEADER_BYTES)
                    self._spans.append((frame.kind.name, frame.step, frame.microbatch, *span))
                    self._to_leave()
                    self._leaving.append(span[1])
                self.unsent -= 1
                self._state.notify_all()

    def _to_leave(self) -> int:
        """Frames that the pipe has not got, or whose time on the uplink is not over."""
        while self._leaving and self._leaving[0] <= time.monotonic():
            self._leaving.popleft()
        return self.unsent + len(self._leaving)

    def _read_loop(self) -> None:
        while True:
            try:
                message = self.pipe.read()
                if message is None:
                    raise WireError("the other end closed it without a goodbye")
            except WireError as error:
                self._break(error)
                self._outgoing.put(None)
                return
            try:
                frame = decode(message, self._max_payload)
                self.meter.count_received(frame.kind, len(message) - HEADER_BYTES)
                if frame.kind != FrameKind.BYE:
                    self._on_frame(frame)
                    continue
                with self._state:
                    self._said_bye = True
                    self._state.notify_all()
                self._on_end()
            except WireError as error:  # the frame is not what was agreed
                self._break(BreachError(str(error)))
                return
            except Exception as error:  # the receiver's failure must not die with this thread
                self._break(error, "handling a frame")
                return

    def _break(self, cause: Exception, doing: str = "") -> None:
        """End the link: the other end is lost or at fault, or `doing` something here failed."""
        kind = BreachError if isinstance(cause, BreachError) else WireError
        reason = f"{doing} failed: {cause!r}" if doing else str(cause)
        with self._state:
            if self._failure or (self._said_bye and not doing):
                return
            self._failure = kind(f"link {self.name} is broken: {reason}")
            self._failure.__cause__ = cause
            self._state.notify_all()
            if self._closing:  # close() need not wait any longer, and does the rest
                return
            self.other_end_at_fault = kind is BreachError
            self.other_end_lost = not doing and kind is WireError
        try:
            self._on_broken(self._failure)
        finally:
            self._outgoing.put(None)
            self.pipe.close()

    def _lost(self) -> bool:
        return self._said_bye or self._failure is not None
