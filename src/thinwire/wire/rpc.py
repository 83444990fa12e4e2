"""Pipes over gRPC: one bidirectional stream of raw byte messages, under mutual TLS.

The side that listens is the gRPC server, the side that dials its client; afterwards both
ends are equal.
"""

import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from typing import Any, NamedTuple
from urllib.parse import unquote

# gRPC's core logs to stderr on its own; what matters there also reaches us as an error. It
# reads this when first imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

import grpc

from thinwire.errors import AdmissionError, WireError, printable
from thinwire.wire.background import on_daemon_thread
from thinwire.wire.kernel import address_text
from thinwire.wire.pipe import CLOSE_GRACE_S, Pipe
from thinwire.wire.stream import (
    DEFAULT_KEEPALIVE,
    Keepalive,
    Outbox,
    StreamPipe,
    common_options,
    why_it_ended,
)
from thinwire.wire.tls import Identity

_SERVICE, _METHOD = "thinwire.Wire", "Exchange"
# "-bin" lets gRPC metadata carry any bytes, so any name will do.
_NAME_KEY, _ACCEPTED_KEY = "thinwire-name-bin", "thinwire-accepted"
_CUT_SHORT = "Locally cancelled"  # how gRPC words a call that we ended
_RETRY_S = 0.2
# Anyone who reaches the port can open connections. Until they have shown a certificate of the run
# they cost a descriptor each, so they have little time to do so, and there are never many.
HANDSHAKE_S = 10.0
MOST_CONNECTIONS = 256


class Listener:
    """Accepts the pipes of expected peers on one port.

    `max_message` is the largest message accepted, header included. Closing the listener
    breaks pipes that are still open. `is_welcome` says of the name in a certificate whether its
    holder may open pipes here: a valid certificate outlives the welcome of a peer.
    """

    def __init__(
        self,
        identity: Identity,
        host: str,
        port: int,
        max_message: int,
        keepalive: Keepalive = DEFAULT_KEEPALIVE,
        is_welcome: Callable[[str], bool] = lambda name: True,
    ) -> None:
        self._is_welcome = is_welcome
        self._expected: dict[str, _Expected] = {}
        self._replaceable: dict[str, _Expected] = {}  # have arrived
        self._lock = threading.Lock()
        handler = grpc.stream_stream_rpc_method_handler(self._exchange)
        self._server = grpc.server(
            _DaemonThreads(),
            handlers=[grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: handler})],
            options=[
                *common_options(max_message, keepalive),
                # Without this a second listener would silently share the port.
                ("grpc.so_reuseport", 0),
                ("grpc.server_handshake_timeout_ms", round(HANDSHAKE_S * 1000)),
                ("grpc.max_allowed_incoming_connections", MOST_CONNECTIONS),
                # Our dialers ping often by design; the default answer is to hang up on them.
                ("grpc.http2.max_ping_strikes", 0),
                ("grpc.http2.min_ping_interval_without_data_ms", 1),
            ],
        )
        credentials = grpc.ssl_server_credentials(
            [(identity.key_pem.encode(), identity.certificate_pem.encode())],
            root_certificates=identity.authority_pem.encode(),
            require_client_auth=True,
        )
        try:
            bound = self._server.add_secure_port(address_text(host, port), credentials)
        except RuntimeError:
            raise WireError(_why_not_bound(host, port)) from None
        self.address = address_text(host, bound)
        self._server.start()

    def accept(
        self,
        name: str,
        timeout: float | None,
        peer_name: str | None = None,
        is_replaceable: bool = False,
    ) -> Pipe:
        """Wait for the peer that dials as `name`; dials by any other name are refused.

        With `peer_name`, so is a dialer whose certificate was issued to another name. Without
        a `timeout` only `close` ends the wait. A replaceable pipe breaks when the same peer dials
        by its name again: that end knows of a loss which this one may not have noticed yet.
        """
        arrival: futures.Future[StreamPipe] = futures.Future()
        with self._lock:
            if name in self._expected:
                raise WireError(f"{self.address} is already waiting for {name!r}")
            self._expected[name] = _Expected(arrival, peer_name, is_replaceable)
        try:
            return arrival.result(timeout)
        except futures.TimeoutError:
            with self._lock:
                self._expected.pop(name, None)
            if arrival.done():  # it came in this very moment
                return arrival.result()
            raise WireError(
                f"{name!r} did not dial {self.address} within {timeout:g} s: is that process "
                "running, and can it reach this address?"
            ) from None

    def close(self) -> None:
        """Stop listening; returns when the port is free again."""
        self._server.stop(grace=None).wait(CLOSE_GRACE_S)
        with self._lock:
            for name, expected in self._expected.items():
                expected.arrival.set_exception(
                    WireError(f"{self.address} was closed before {name!r} dialed it")
                )
            self._expected.clear()

    def _exchange(self, incoming: Iterator[bytes], context: Any) -> Iterator[bytes]:
        name = dict(context.invocation_metadata()).get(_NAME_KEY, b"").decode(errors="replace")
        outgoing = Outbox()
        pipe = StreamPipe(outgoing, incoming, context.cancel)
        pipe.comes_from = unquote(context.peer()).partition(":")[2]  # ipv4:127.0.0.1:40000
        identities = [shown.decode(errors="replace") for shown in context.peer_identities() or ()]
        for shown in identities:
            if not self._is_welcome(shown):
                context.abort(grpc.StatusCode.PERMISSION_DENIED, f"{shown!r} is not welcome there")
        with self._lock:
            expected = self._expected.get(name)
            refusal = _refusal(name, expected, identities)
            if expected and not refusal and context.add_callback(pipe.stream_is_over):
                # Raises if the dialer has given up by now; then its next attempt is expected.
                context.send_initial_metadata(((_ACCEPTED_KEY, "yes"),))
                del self._expected[name]
                expected.arrival.set_result(pipe)
                if expected.is_replaceable:
                    self._replaceable[name] = expected
                return outgoing.to_the_last()
            earlier = None if expected else self._replaceable.get(name)
        if earlier and not _refusal(name, earlier, identities):
            earlier.arrival.result().cut()  # its holder accepts again, and the dialer tries again
        context.abort(grpc.StatusCode.FAILED_PRECONDITION, refusal or "the stream has ended")
        raise AssertionError("abort raises")


class _Expected(NamedTuple):
    """A dial that is waited for, and the name its certificate must carry, if any will not do."""

    arrival: "futures.Future[StreamPipe]"
    peer_name: str | None
    is_replaceable: bool


def _refusal(name: str, expected: _Expected | None, shown: Iterable[str]) -> str:
    """Why a dial as `name` by the holder of a certificate is refused; empty if it is not."""
    if expected is None:
        return f"{name!r} is not expected there"
    if expected.peer_name not in (None, *shown):
        return f"{name!r} is expected from {expected.peer_name!r}, not from {', '.join(shown)}"
    return ""


def dial(
    address: str,
    name: str,
    identity: Identity,
    server_name: str,
    timeout: float,
    max_message: int,
    keepalive: Keepalive = DEFAULT_KEEPALIVE,
) -> Pipe:
    """Open a pipe to the listener at `address`, as `name`; tries again until `timeout`.

    `server_name` is the name of the identity that the listener must prove to have. A listener at
    which this identity is not welcome is not asked again: AdmissionError.
    """
    deadline = time.monotonic() + timeout
    credentials = grpc.ssl_channel_credentials(
        root_certificates=identity.authority_pem.encode(),
        private_key=identity.key_pem.encode(),
        certificate_chain=identity.certificate_pem.encode(),
    )
    options = [
        *common_options(max_message, keepalive),
        ("grpc.ssl_target_name_override", server_name),
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    reason = ""
    while True:
        # A channel of its own per attempt: no back-off of earlier attempts, no shared connection.
        # Said as the name of a machine, for gRPC would also take "unix:PATH".
        channel = grpc.secure_channel(f"dns:///{address}", credentials, options)
        outcome = _try_to_dial(channel, name, deadline)
        if isinstance(outcome, Pipe):
            return outcome
        if not reason or _CUT_SHORT not in outcome:  # an answer says more than our own deadline
            reason = outcome
        if time.monotonic() + _RETRY_S >= deadline:
            raise WireError(
                f"cannot open a link to {server_name!r} at {address} as {name!r} within "
                f"{timeout:g} s: {_plainly(reason)}"
            )
        time.sleep(_RETRY_S)


def _try_to_dial(channel: grpc.Channel, name: str, deadline: float) -> Pipe | str:
    """The pipe, or why there is none."""
    outgoing = Outbox()
    open_stream = channel.stream_stream(f"/{_SERVICE}/{_METHOD}")
    call = open_stream(outgoing.to_the_last(), metadata=((_NAME_KEY, name.encode()),))
    out_of_time = threading.Timer(max(0.0, deadline - time.monotonic()), call.cancel)
    out_of_time.daemon = True
    out_of_time.start()
    accepted = _ACCEPTED_KEY in dict(call.initial_metadata() or ())
    out_of_time.cancel()
    if not accepted:
        reason, is_unwelcome = why_it_ended(call), call.code() is grpc.StatusCode.PERMISSION_DENIED
        details = call.details()
        outgoing.end()  # gRPC's sending thread waits there
        channel.close()
        if is_unwelcome:
            raise AdmissionError(
                f"refused: {printable(details or '')}; its host removed this peer from the run, or "
                "does not know it: ask for a new invite"
            )
        return reason
    pipe = StreamPipe(outgoing, call, channel.close)
    if not call.add_callback(pipe.stream_is_over):
        pipe.stream_is_over()
    return pipe


def _why_not_bound(host: str, port: int) -> str:
    # gRPC does not say why it could not bind; the socket layer does.
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
        reason = "unknown reason"
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return (
                f"port {port} on {host} is in use by another process: set link.port to another "
                "port, or to 0 for any free one"
            )
        reason = error.strerror or str(error)
    return (
        f"cannot listen on port {port} of {host}: {reason}; set link.listen to an address of "
        "this machine, and link.port to 0 or a port this user may open"
    )


def _plainly(reason: str) -> str:
    # gRPC's words name the layer that failed; most readers need to know what to look at.
    advice = {
        "Connection refused": "nothing listens there; is that process running?",
        "Hostname Verification": "another process of this run listens there",
        "CERTIFICATE_VERIFY_FAILED": "a process of another run listens there",
        "Socket closed": "it closed the connection; was this identity issued by the same run?",
        _CUT_SHORT: "no answer; is the address right and the port open?",
    }
    hints = [text for sign, text in advice.items() if sign in reason]
    return f"{hints[0]} ({reason})" if hints else reason


class _DaemonThreads(futures.Executor):
    """Gives each stream a daemon thread, so that a forgotten pipe cannot hold up exit."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> futures.Future[Any]:
        return on_daemon_thread("thinwire stream", lambda: fn(*args, **kwargs))
