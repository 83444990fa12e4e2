"""Pipes over TLS 1.3: messages behind their lengths, and both ends proven by their keys.

A listener proves its key by the TLS handshake. A dialer says nothing before it has compared that
with the one that it expects; then it signs the listener's nonce and the stream's name, so that the
signature counts once (docs/wire.md).
"""

import contextlib
import secrets
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable
from concurrent import futures
from typing import TypeVar

from thinwire.background import on_daemon_thread
from thinwire.errors import AdmissionError, BreachError, WireError, printable
from thinwire.wire.door import Routes
from thinwire.wire.frame import BytesLike
from thinwire.wire.keys import Identity, dialing_context, fingerprint_of, proven_by, shown_key
from thinwire.wire.pipe import CLOSE_GRACE_S, Pipe
from thinwire.wire.sockets import ListeningPort, hang_up

T = TypeVar("T")

# Anyone who reaches a port can open connections. Until they have proven a key they cost a thread
# and a descriptor each, so they have little time to do so, and there are never many.
HANDSHAKE_S = 10.0
MOST_STRANGERS = 256
_GREETING_BYTES = 4096
_HEAD = struct.Struct("<I")
_END, _ALIVE = 0, 0xFFFFFFFF
_SHORTEST, _UNKNOWN = struct.Struct("=148xI"), 0xFFFFFFFF  # round trip, within Linux's tcp_info
_RECORD = 1 << 14  # what TLS encrypts at a time
_RETRY_S = 0.2
SILENCE_S = 10.0  # after which an end is taken for lost: each says twice as often that it is alive


class Stream(Pipe):
    """One TLS connection as a pipe. `public` is the key that the other end has proven. Who dials
    has no context of TLS of its own. All until it is open has a deadline.
    """

    def __init__(
        self, connection: socket.socket, deadline: float, listening: ssl.SSLContext | None = None
    ) -> None:
        self.public = ""
        self.deadline: float | None = deadline  # until it is open
        self.opened_as = "", ""  # where a listener accepted it: its name, and who dialed
        self._limit = _GREETING_BYTES
        self._in_tls = threading.Lock()  # Python's TLS is not for two threads at once
        self._reading, self._writing = threading.Lock(), threading.Lock()
        self._closed = False  # by us
        self._said_end = self._heard_end = False
        self._over = threading.Event()
        connection.setblocking(False)
        try:
            self._tls = (listening or dialing_context()).wrap_socket(
                connection,
                server_side=listening is not None,
                do_handshake_on_connect=False,
                suppress_ragged_eofs=False,
            )
        except OSError as error:
            connection.close()
            raise WireError(f"the other end is gone ({_plainly(error)})") from None

    def shake_hands(self) -> None:
        """Begin TLS; a listener proves its key by that."""
        with self._reading:
            self._do(self._tls.do_handshake)
            if not self._tls.server_side:
                self.public = shown_key(self._tls.getpeercert(binary_form=True))

    def open(self, limit: int, who: tuple[str, str] = ("", "")) -> None:
        """Both ends are known: from now on messages may have `limit` bytes, and silence counts."""
        self._limit, self.deadline, self.opened_as = limit, None, who

    def write(self, message: BytesLike) -> None:
        if not len(message):
            raise WireError("an empty message cannot be sent")
        with self._writing:
            if self._closed or self._heard_end:
                raise WireError("the stream is closed" if self._closed else "the other end is gone")
            self._send(len(message), message)

    def read(self) -> BytesLike | None:
        try:
            with self._reading:
                while not self._heard_end:
                    (size,) = _HEAD.unpack(self._receive(_HEAD.size))
                    if size == _END:
                        self._heard_end = True
                    elif size != _ALIVE:
                        if size > self._limit:
                            self._heard_end = True  # what follows cannot be read
                            raise BreachError(
                                f"a message of {size} bytes came, at most {self._limit} are taken"
                            )
                        return self._receive(size)
        except WireError as error:
            if isinstance(error, BreachError) or not self._closed:
                raise
        else:
            with contextlib.suppress(WireError):
                self._say_end()  # the other end reads no more, and need not wait for us
        return None

    def close(self, grace: float | None = CLOSE_GRACE_S) -> None:
        self._closed = True
        # Letting go at once would cut off what is still on its way out. The stream is over once
        # both ends have read it to its end, and here nobody may be reading any more.
        futures.wait([on_daemon_thread("thinwire close", self._take_leave)], grace)
        self.cut()

    def cut(self) -> None:
        """Break it at once: both ends see a lost connection."""
        self._over.set()
        hang_up(self._tls)
        with self._reading, self._writing:  # nobody waits on the descriptor that is given back
            self._tls.close()

    def round_trip(self) -> float:
        """As the system measures it on the packets of the connection: the shortest of the last
        minutes, so without queues. Where a door passes it on, that is the way to there.
        """
        with contextlib.suppress(OSError, AttributeError, struct.error):  # Linux alone tells
            told = self._tls.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _SHORTEST.size)
            (microseconds,) = _SHORTEST.unpack(told)
            return microseconds / 1e6 if microseconds != _UNKNOWN else 0.0
        return 0.0

    def keep_alive(self) -> None:
        """Say now and then that this end is alive; returns when the stream is over."""
        while not self._over.wait(SILENCE_S / 2):
            with contextlib.suppress(WireError), self._writing:  # whoever reads tells of a loss
                if not self._said_end:
                    self._send(_ALIVE)

    def _take_leave(self) -> None:
        with contextlib.suppress(WireError):
            self._say_end()
            while self.read() is not None:
                pass

    def _say_end(self) -> None:
        with self._writing:
            if not self._said_end:
                self._said_end = True
                self._send(_END)

    def _send(self, size: int, message: BytesLike = b"") -> None:
        whole = memoryview(message)
        first = _HEAD.pack(size) + whole[: _RECORD - _HEAD.size]
        for part in (memoryview(first), whole[_RECORD - _HEAD.size :]):
            while part:
                part = part[self._do(self._tls.send, part) :]

    def _receive(self, size: int) -> bytearray:
        space = bytearray(size)
        left = memoryview(space)
        while left:
            count = self._do(self._tls.recv_into, left)
            if not count:
                raise WireError("the other end is gone (the connection was lost)")
            left = left[count:]
        return space

    def _do(self, call: Callable[..., T], *arguments: memoryview) -> T:
        """Call TLS, which says what it waits for; that is waited for without holding it."""
        while not self._over.is_set():
            try:
                with self._in_tls:
                    return call(*arguments)
            except ssl.SSLWantReadError:
                awaited = select.POLLIN
            except ssl.SSLWantWriteError:
                awaited = select.POLLOUT
            except OSError as error:
                raise WireError(f"the other end is gone ({_plainly(error)})") from None
            seconds = SILENCE_S if awaited == select.POLLIN else None
            if self.deadline is not None:
                seconds = max(0.0, self.deadline - time.monotonic())
            poll = select.poll()
            poll.register(self._tls, awaited)
            if not poll.poll(None if seconds is None else seconds * 1000):
                raise WireError(f"the other end is gone (it said nothing for {seconds:.3g} s)")
        raise WireError("the other end is gone (the connection is closed)")


def dial(
    to: str | Routes,
    name: str,
    identity: Identity,
    whom: str,
    timeout: float,
    max_message: int,
    tries_again: bool = True,
) -> Stream:
    """Open a stream called `name` to a listener whose key has the fingerprint `whom`; tries again
    until `timeout`. AdmissionError: this identity is not welcome there. With a single attempt, a
    BreachError says that who answers has another key: then nothing was said to it.
    """
    routes = Routes("", to) if isinstance(to, str) else to
    deadline = time.monotonic() + timeout
    reason = ""
    while (left := deadline - time.monotonic()) > 0:
        attempt = min(left, HANDSHAKE_S) if tries_again else left
        try:
            stream = Stream(routes.connect(attempt), time.monotonic() + attempt)
            try:
                stream.shake_hands()
                _greet(stream, name, identity, whom)
            except WireError:
                stream.cut()
                raise
            stream.open(max_message)
            on_daemon_thread("thinwire stream", stream.keep_alive)
            return stream
        except WireError as error:
            if isinstance(error, AdmissionError) or not tries_again:
                raise
            if not reason or time.monotonic() < deadline:  # an answer says more than our deadline
                reason = str(error)
        time.sleep(max(0.0, min(_RETRY_S, deadline - time.monotonic())))
    raise WireError(
        f"cannot open the link {name!r} to {routes} within {timeout:g} s: "
        f"{reason or 'there was no time'}"
    )


def _greet(stream: Stream, name: str, identity: Identity, whom: str) -> None:
    """What a dialer says, once it knows to whom."""
    if fingerprint_of(stream.public) != whom:
        raise BreachError("another process listens there: it has another key")
    shown = identity.prove(_to_sign(_told(stream), whom, name))
    stream.write(f"{shown}\n{name}".encode())
    word, _, reason = _told(stream).partition(" ")
    if word == "gone":
        raise AdmissionError(
            f"refused: {reason}; its host removed this peer from the run, or does not know it: ask "
            "for a new invite"
        )
    if word != "ok":
        raise WireError(reason or "its answer cannot be read")


class Listener:
    """Accepts the streams of expected peers, on one port (none without a host) and over connections
    that it is given (`take`). Closing it breaks streams that are still open. `who` says whose key
    it is, by its fingerprint; None: its holder may open no streams here.
    """

    def __init__(
        self,
        identity: Identity,
        host: str | None,
        port: int,
        max_message: int,
        who: Callable[[str], str | None] = lambda fingerprint: fingerprint,
    ) -> None:
        self._identity, self._who, self._max_message = identity, who, max_message
        self._context = identity.listening_context()
        self._served: dict[str, Callable[[Stream], None]] = {}
        self._lock = threading.Lock()  # guards all that follows
        self._expected: dict[str, tuple[futures.Future[Stream], str]] = {}  # and whose it must be
        self._streams: set[Stream] = set()
        self._is_closed = False
        self.address, self._port = "", None
        if host is not None:
            self._port = ListeningPort(host, port, self.take)
            self.address = self._port.address

    def take(self, connection: socket.socket, comes_from: str) -> None:
        """Receive who dials over this connection, and return when the stream is over."""
        with contextlib.suppress(WireError):
            stream = Stream(connection, time.monotonic() + HANDSHAKE_S, self._context)
            try:
                stream.comes_from = comes_from
                with self._lock:
                    strangers = sum(other.deadline is not None for other in self._streams)
                    if self._is_closed or strangers >= MOST_STRANGERS:
                        return
                    self._streams.add(stream)
                stream.shake_hands()
                nonce = secrets.token_hex(16)
                stream.write(nonce.encode())
                shown, _, name = _told(stream).partition("\n")
                text = _to_sign(nonce, self._identity.fingerprint, name)
                stream.public = proven_by(text, shown)
                if name in self._served:
                    stream.write(b"ok")
                    self._served[name](stream)
                    stream.close()
                elif refusal := self._refusal(name, stream):
                    stream.write(refusal.encode())
                    stream.close(1.0)
                else:
                    stream.keep_alive()
            finally:
                with self._lock:
                    self._streams.discard(stream)
                stream.cut()

    def accept(self, name: str, timeout: float | None, dialer: str = "") -> Pipe:
        """Wait for who dials as `name`, with a `dialer` for that peer alone (`who`). The stream
        breaks when the same peer dials by its name again, and nobody waits for that: it knows of a
        loss which this end may not have noticed yet.
        """
        arrival: futures.Future[Stream] = futures.Future()
        with self._lock:
            if self._is_closed:
                raise WireError(f"{self.address or 'the listener'} is closed")
            if name in self._expected:
                raise WireError(f"{self.address} is already waiting for {name!r}")
            self._expected[name] = arrival, dialer
        try:
            return arrival.result(timeout)
        except futures.TimeoutError:
            with self._lock:
                if not arrival.cancel():  # it came in this very moment
                    return arrival.result()
                self._expected.pop(name)
            raise WireError(
                f"{name!r} did not dial {self.address} within {timeout:g} s: is that process "
                "running, and can it reach this address?"
            ) from None

    def serve(self, name: str, handle: Callable[[Stream], None]) -> None:
        """Handle each stream of this name, of whoever dials, on a thread of its own; then it ends.
        All of that has the time that strangers have, and messages are as short as theirs.
        """
        self._served[name] = handle

    def close(self) -> None:
        """Stop listening, and break what is open."""
        if self._port is not None:
            self._port.close()
        with self._lock:
            self._is_closed = True
            streams = [*self._streams]
            for name, (arrival, _) in self._expected.items():
                reason = f"{self.address} was closed before {name!r} dialed it"
                arrival.set_exception(WireError(reason))
            self._expected = {}
        for stream in streams:
            stream.cut()

    def _refusal(self, name: str, stream: Stream) -> str:
        """Hand over a stream that is expected, and say "ok" to it; else what to answer."""
        fingerprint = fingerprint_of(stream.public)
        dialer = self._who(fingerprint)
        if dialer is None:
            return f"gone the key {fingerprint[:16]} is not welcome there"
        with self._lock:
            if name not in self._expected:
                before = [one for one in self._streams if one.opened_as == (name, dialer)]
            else:
                arrival, wanted = self._expected[name]
                if wanted not in ("", dialer):
                    return f"no {name!r} is expected from {wanted[:63]}, not from {dialer[:63]}"
                stream.write(b"ok")  # fails if the dialer has given up: its next attempt counts
                stream.open(self._max_message, (name, dialer))
                del self._expected[name]
                arrival.set_result(stream)
                return ""
        for one in before:
            one.cut()  # its holder accepts again, and the dialer tries again
        return f"no {name!r} is not expected there"


def _to_sign(nonce: str, listener: str, name: str) -> str:
    return f"thinwire stream {nonce} {listener} {name}"


def _told(stream: Stream) -> str:
    """A short text of the other end's, before the stream is open."""
    message = stream.read()
    if message is None:
        raise WireError("the other end closed the connection")
    return printable(bytes(message).decode(errors="replace"))


def _plainly(error: OSError) -> str:
    """Why a connection ended. TLS has words of its own; most readers need to know less."""
    if isinstance(error, ssl.SSLEOFError | ConnectionResetError | BrokenPipeError):
        return "the connection was lost"
    if isinstance(error, ssl.SSLError):
        return f"no TLS connection: {error.reason or error}"
    return error.strerror or str(error)
