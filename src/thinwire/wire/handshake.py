"""The handshake: each end says who it is and what it runs, before the first frame of work."""

import json
from collections.abc import Callable
from concurrent import futures
from typing import Any

from thinwire.errors import WireError, printable
from thinwire.wire.background import on_daemon_thread
from thinwire.wire.frame import BytesLike, Frame, FrameKind, decode, encode
from thinwire.wire.meter import Meter
from thinwire.wire.pipe import Pipe

MAX_HELLO = 1 << 16

Remedy = Callable[[str, Any, Any], str]
"""(key, ours, theirs) -> what to do about this difference, or nothing."""


def handshake(
    pipe: Pipe,
    mine: dict[str, Any],
    expect: dict[str, Any],
    timeout: float,
    meter: Meter | None = None,
    remedy: Remedy = lambda key, mine, theirs: "",
) -> dict[str, Any]:
    """Exchange one HELLO each way and return what the other end said of itself.

    Runs on a bare pipe, before its link starts. Every key of `expect` must have the same
    value at the other end; a difference in any raises one WireError that names them all and what
    mends them, and the pipe is closed, so that the other end does not wait for work.
    """
    meter = meter or Meter()
    try:
        payload = json.dumps(mine, sort_keys=True).encode()
        if len(payload) > MAX_HELLO:
            raise WireError(
                f"handshake of {len(payload)} bytes, but at most {MAX_HELLO} are allowed"
            )
        pipe.write(encode(Frame(FrameKind.HELLO, payload=payload)))
        meter.count_sent(FrameKind.HELLO, len(payload))
        theirs, received = _read_hello(pipe, timeout)
        meter.count_received(FrameKind.HELLO, received)
        _compare(theirs, expect, remedy)
        return theirs
    except WireError:
        # Aside, because closing lets the other end read our HELLO first, and it may not be.
        on_daemon_thread("handshake", pipe.close)
        raise


def _read_hello(pipe: Pipe, timeout: float) -> tuple[dict[str, Any], int]:
    message = _read_within(pipe, timeout)
    frame = decode(message, MAX_HELLO)
    if frame.kind != FrameKind.HELLO:
        raise WireError(f"handshake: expected HELLO first, got {frame.kind.name}")
    try:
        theirs = json.loads(bytes(frame.payload))
    except (ValueError, RecursionError) as error:
        raise WireError(
            f"handshake: the other end's HELLO is not JSON: {printable(str(error), 200)}"
        ) from None
    if not isinstance(theirs, dict):
        raise WireError("handshake: the other end's HELLO is not a JSON object")
    return theirs, memoryview(frame.payload).nbytes


def _read_within(pipe: Pipe, timeout: float) -> BytesLike:
    # Pipes have no time-out of their own: afterwards, keepalive watches for silence. If time
    # runs out here, the caller closes the pipe, which ends this thread too.
    try:
        message = on_daemon_thread("handshake", pipe.read).result(timeout)
    except futures.TimeoutError:
        raise WireError(f"handshake: the other end said nothing for {timeout:g} s") from None
    except WireError as error:
        raise WireError(f"handshake: {error}") from error
    if message is None:
        raise WireError("handshake: the other end closed the link; its own message says why")
    return message


def _compare(theirs: dict[str, Any], expect: dict[str, Any], remedy: Remedy) -> None:
    differences = []
    for key, wanted in expect.items():
        if key not in theirs:
            differences.append(f"{key}: this stage has {wanted}, the other end does not say")
        elif theirs[key] != wanted:
            said = printable(str(theirs[key]), 200)
            what_to_do = remedy(key, wanted, theirs[key])
            differences.append(
                f"{key}: this stage has {wanted}, the other end has {said}"
                + (f" ({printable(what_to_do, 300)})" if what_to_do else "")
            )
    if differences:
        raise WireError("handshake: the two ends do not match: " + "; ".join(differences))
