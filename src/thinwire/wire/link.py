"""A link: frames between two neighbouring stages, sent without making compute wait.

A pipe is what a link needs of a transport; the one that stays in memory is here. Before the first
frame each end says who it is and what it runs (`handshake`). Then `send` only queues. Packing,
checksumming and writing happen on the link's own threads:

    send() -> queue -> packing thread -> [waits for the uplink] -> pipe   (in brackets: only when
    pipe -> reading thread -> [waits for its arrival] -> on_frame          emulating a slow network)

A link ends in good order, when one end sends BYE after everything it had queued, or it is broken,
which is reported once to `on_broken` with the reason.
"""

import collections
import json
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from thinwire.background import on_daemon_thread
from thinwire.errors import BreachError, WireError, printable
from thinwire.typed import option
from thinwire.wire.emulate import DelayLine, Nic, stamp, unstamp
from thinwire.wire.frame import HEADER_BYTES, BytesLike, Frame, FrameKind, Meter, decode, encode

CLOSE_GRACE_S = 5.0
Span = tuple[str, int, int, float, float]

Remedy = Callable[[str, Any, Any], str]  # (key, ours, theirs) -> what to do about it, or nothing

Arrival = Frame | WireError | None  # what came, why no more can, or the end of the stream

MAX_SPANS = 65536
_MOST_UNTAKEN = 8  # frames that are due, and read while the receiver is not done with one
# After a failed write, how long the reading thread may take to learn whether the other end
# had said goodbye before.
_LAST_WORD_S = 2.0

MAX_HELLO = 1 << 16
SLOWEST_MBPS = 1e-3  # below it no run ends
_option = partial(option, scope="machine")


class Pipe(ABC):
    """Moves whole byte messages, none of them empty, both ways, in order, between two ends. Reading
    and writing may happen on different threads at once. Closing is idempotent.
    """

    comes_from: str = ""  # the host of who dialed, where a listener accepted it
    state: Any = None  # a LinkState, where another process may take the place of the other end

    @abstractmethod
    def write(self, message: BytesLike) -> None:
        """Hand a message over; may block while the transport is full. WireError if it broke."""

    def keep(self, message: BytesLike) -> bool:
        """Called with each frame before it is written; False if it need not be."""
        return True

    @abstractmethod
    def read(self) -> BytesLike | None:
        """Wait for the next message; None once either end closed in good order."""

    def read_within(self, seconds: float | None) -> BytesLike | None:
        """The same with an end. After a WireError because of that, close it: a thread reads on."""
        try:
            return on_daemon_thread("thinwire reading", self.read).result(seconds)
        except futures.TimeoutError:
            raise WireError(f"the other end said nothing for {seconds:g} s") from None

    @abstractmethod
    def close(self, grace: float | None = CLOSE_GRACE_S) -> None:
        """End both directions; messages already written still reach the other end, which has
        `grace` seconds to read them; None waits for as long as the connection lives.
        """

    def round_trip(self) -> float:
        """Seconds to the other end of its connection and back, at the moment; 0: not known."""
        return 0.0


class _MemoryPipe(Pipe):
    """One end: a bound keeps a fast writer from filling memory, and closing wakes who waits."""

    def __init__(self, limit: int, changed: threading.Condition) -> None:
        self._limit, self._changed = limit, changed  # which both ends share
        self._unread: collections.deque[BytesLike] = collections.deque()
        self._is_closed = False
        self.other = self

    def write(self, message: BytesLike) -> None:
        unread = self.other._unread
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended() or len(unread) < self._limit)
            if self._has_ended():
                raise WireError("the pipe is closed")
            unread.append(message)
            self._changed.notify_all()

    def read(self) -> BytesLike | None:
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended() or self._unread)
            self._changed.notify_all()
            return self._unread.popleft() if self._unread else None

    def close(self, grace: float | None = CLOSE_GRACE_S) -> None:
        with self._changed:
            self._is_closed = True
            self._unread.clear()
            self._changed.notify_all()

    def _has_ended(self) -> bool:
        return self._is_closed or self.other._is_closed


def memory_pair(limit: int = 1024) -> tuple[Pipe, Pipe]:
    """Two ends joined inside this process, each holding at most `limit` unread messages."""
    changed = threading.Condition()
    here, there = _MemoryPipe(limit, changed), _MemoryPipe(limit, changed)
    here.other, there.other = there, here
    return here, there


@dataclass(frozen=True)
class LinkConfig:
    """The network between stages: its emulated rates, and where stages listen."""

    mbps_up: float = _option(
        80.0, "uplink rate of each host in Mbit/s; 0 = unlimited", least=SLOWEST_MBPS, auto=0
    )
    mbps_down: float = _option(
        80.0, "downlink rate of each host in Mbit/s; 0 = unlimited", least=SLOWEST_MBPS, auto=0
    )
    latency_ms: float = _option(25.0, "one-way delay of each link in milliseconds", least=0)
    jitter_ms: float = _option(
        0.0, "maximum extra random delay of a message in milliseconds", least=0
    )
    emulate: bool = _option(True, "emulate these rates and delays; false = no delays")
    listen: str = _option("127.0.0.1", "address on which stages accept links")
    outage: float = _option(
        60.0,
        "seconds for which a link may be down before the run ends; 0 = end it at the first loss",
        least=0,
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
    """Frames to and from one neighbour over a pipe, metered and, with a Nic, held back. All links
    of a stage share its Nic. `max_payload` bounds what the other end may send in one frame.
    """

    def __init__(
        self, pipe: Pipe, meter: Meter, nic: Nic | None, name: str, max_payload: int
    ) -> None:
        self.name, self.meter, self.pipe = name, meter, pipe
        self.other_end_lost = False  # broken, and not by a fault in this process
        self.other_end_at_fault = False  # broken, for it sent what the contract forbids
        self._nic = nic
        self._max_payload = max_payload
        self._spans: collections.deque[Span] = collections.deque(maxlen=MAX_SPANS)
        self._outgoing: queue.SimpleQueue[Frame | Callable[[], Frame] | None] = queue.SimpleQueue()
        self._state = threading.Condition()
        self.unsent = 0  # handed to `send`, and not yet to the transport
        self._unpacked = 0  # ... and without a place on the uplink
        self._leaving: collections.deque[float] = collections.deque()  # when they leave the uplink
        self._started = False
        self._closing = False
        self._said_bye = False  # the other end did
        self._failure: WireError | None = None
        self._reading_ended = threading.Event()
        self._out_line: DelayLine[bytes] | None = None
        self._in_line: DelayLine[Arrival] | None = None

    def start(
        self,
        on_frame: Callable[[Frame], None],
        on_broken: Callable[[WireError], None],
        on_end: Callable[[], object] = lambda: None,
    ) -> None:
        """Begin to move frames; all callbacks run on the link's threads.

        `on_frame` gets every frame except BYE, for which there is `on_end`. If it raises, the link
        is broken; a WireError says that the frame is not what was agreed, and `on_broken` gets a
        BreachError.
        """
        self._started = True
        self._on_frame, self._on_broken, self._on_end = on_frame, on_broken, on_end
        if self._nic is not None:
            self._out_line = DelayLine(self._write, f"{self.name} uplink")
            self._in_line = DelayLine(self._deliver, f"{self.name} downlink", _MOST_UNTAKEN)
        for loop, work in ((self._send_loop, "packing"), (self._read_loop, "reading")):
            threading.Thread(target=loop, name=f"{self.name} {work}", daemon=True).start()

    def send(self, item: Frame | Callable[[], Frame]) -> None:
        """Queue a frame, or a function that packs one on the sending thread; never blocks.
        WireError if the link is closed, broken, or left by the other end.
        """
        with self._state:
            if reason := self._why_stopped():
                raise WireError(f"link {self.name} takes no more frames: {reason}")
            self._queue(item)

    def wait_for_room(self, frames: int) -> None:
        """Wait until fewer than `frames` frames are still to leave, or the link is lost."""
        with self._state:
            while self._to_leave() >= frames and not self._lost():
                next_look = self._leaving[0] - time.monotonic() if self._leaving else None
                self._state.wait(next_look)

    def flush(self) -> None:
        """Wait until every frame handed to `send` has left: the uplink too, where one is emulated.
        WireError if the link is lost before; after a goodbye of the other end nobody needs them.
        """
        with self._state:
            self.wait_for_room(1)
            if (unsent := self._to_leave()) and not self._said_bye:
                raise WireError(f"link {self.name}: {unsent} frames unsent: {self._why_stopped()}")

    def close(self, timeout: float | None = 10.0) -> None:
        """Send what is queued and a BYE, then close the pipe; never raises, and reports no loss.
        What is not sent within `timeout` seconds is dropped; None drops nothing while the link
        holds.
        """
        with self._state:
            if self._closing:
                return
            if self._started and not self._lost():
                self._queue(Frame(FrameKind.BYE))
            self._closing = True
            self._state.wait_for(
                lambda: not (self._started and self.unsent) or self._lost(), timeout
            )
        self._stop_threads()
        self.pipe.close(None if timeout is None else CLOSE_GRACE_S)

    def settle(self) -> None:
        """Wait until all that was handed to `send` is billed and has its span, or the link is lost:
        for packing, not for a passage over the link.
        """
        with self._state:
            self._state.wait_for(lambda: not self._unpacked or self._lost())

    def take_spans(self) -> list[Span]:
        """(kind, step, microbatch, start, end) of each frame sent since the last call: when it
        occupied the emulated uplink or, without emulation, the transport's write.
        """
        return [self._spans.popleft() for _ in range(len(self._spans))]

    def _queue(self, item: Frame | Callable[[], Frame]) -> None:
        self.unsent += 1
        self._unpacked += 1
        self._outgoing.put(item)

    def _send_loop(self) -> None:
        while (item := self._outgoing.get()) is not None and not self._lost():
            try:
                frame = item if isinstance(item, Frame) else item()
                message = encode(frame)
            except Exception as error:  # whatever packing raised belongs to the run, not to us
                self._break(f"packing a frame failed: {error!r}", error, here=True)
                return
            if not self.pipe.keep(message):
                with self._state:
                    self.unsent -= 1
                    self._unpacked -= 1
                    self._state.notify_all()
                continue
            self.meter.count_sent(frame.kind, len(message) - HEADER_BYTES)
            start = time.monotonic()
            if self._nic is not None and self._out_line is not None:
                start, end, arrival = self._nic.reserve_up(len(message), start)
                self._out_line.put(start, stamp(message, arrival))
            else:
                self._write(message)
                end = time.monotonic()
            self._spans.append((frame.kind.name, frame.step, frame.microbatch, start, end))
            with self._state:
                self._unpacked -= 1
                self._to_leave()
                self._leaving.append(end)
                self._state.notify_all()

    def _to_leave(self) -> int:
        """Frames that the transport has not got, or whose time on the uplink is not over."""
        while self._leaving and self._leaving[0] <= time.monotonic():
            self._leaving.popleft()
        return max(self.unsent, self._unpacked + len(self._leaving))

    def _write(self, message: bytes) -> None:
        try:
            self.pipe.write(message)
        except WireError as error:
            # The reading thread knows better why: perhaps a BYE came just before.
            self._reading_ended.wait(_LAST_WORD_S)
            self._break(str(error), error)
            return
        with self._state:
            self.unsent -= 1
            self._state.notify_all()

    def _read_loop(self) -> None:
        while not self._reading_ended.is_set():
            arrival, size, due = self._next_arrival()
            if not isinstance(arrival, Frame):
                self._reading_ended.set()
            else:
                self.meter.count_received(arrival.kind, size - HEADER_BYTES)
                if arrival.kind == FrameKind.BYE:
                    with self._state:
                        self._said_bye = True
                        self._state.notify_all()
            if self._nic is not None and self._in_line is not None:
                self._in_line.put(self._nic.reserve_down(size, due), arrival)
            else:
                self._deliver(arrival)

    def _next_arrival(self) -> tuple[Arrival, int, float]:
        """What the transport brings next, its size, and when its last byte arrived."""
        try:
            message = self.pipe.read()
        except WireError as error:
            return error, 0, time.monotonic()
        due = time.monotonic()
        if message is None:
            return None, 0, due
        frame: BytesLike = message
        try:
            if self._nic is not None:
                due, frame = unstamp(message)
            return decode(frame, self._max_payload), len(frame), due
        except WireError as error:
            return BreachError(str(error)), 0, due

    def _deliver(self, arrival: Arrival) -> None:
        if isinstance(arrival, Frame):
            try:
                if arrival.kind == FrameKind.BYE:
                    self._on_end()
                else:
                    self._on_frame(arrival)
            except WireError as error:  # the frame is not what was agreed
                self._break(str(error), BreachError(str(error)))
            except Exception as error:  # the receiver's failure must not die with this thread
                self._break(f"handling a frame failed: {error!r}", error, here=True)
        else:
            reason = str(arrival or "the other end closed it without a goodbye")
            self._break(reason, arrival)
            self._stop_threads()

    def _break(self, reason: str, cause: BaseException | None, here: bool = False) -> None:
        """End the link for a fault `here` in this process, or of the other end, or its loss."""
        breach = isinstance(cause, BreachError)
        with self._state:
            if self._failure or (self._said_bye and not here):
                return
            kind = BreachError if breach else WireError
            self._failure = kind(f"link {self.name} is broken: {reason}")
            self._failure.__cause__ = cause
            self._state.notify_all()
            if self._closing:  # close() need not wait any longer, and does the rest
                return
            self.other_end_at_fault = breach
            self.other_end_lost = not here and not breach
        try:
            self._on_broken(self._failure)
        finally:
            self._stop_threads()
            self.pipe.close()

    def _stop_threads(self) -> None:
        self._outgoing.put(None)
        for line in (self._out_line, self._in_line):
            if line is not None:
                line.stop()

    def _lost(self) -> bool:
        return self._said_bye or self._failure is not None

    def _why_stopped(self) -> str:
        if self._closing:
            return "it was closed here"
        if self._failure is not None:
            return str(self._failure)
        return "the other end said goodbye" if self._said_bye else ""
