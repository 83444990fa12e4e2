"""The wire: frames between stages, over gRPC with mutual TLS, metered and never blocking.

See docs/wire.md for the format and the model of the emulated network.
"""

from thinwire.wire.door import Door, Grant, Limits, Traffic
from thinwire.wire.emulate import Nic
from thinwire.wire.frame import HEADER_BYTES, Frame, FrameKind, decode, encode
from thinwire.wire.handshake import handshake
from thinwire.wire.kernel import SocketTotals, raise_descriptor_limit, socket_totals
from thinwire.wire.lasting import LastingPipe
from thinwire.wire.link import Link, LinkConfig, Span
from thinwire.wire.meter import Meter, Unmetered
from thinwire.wire.pipe import Pipe, memory_pair
from thinwire.wire.rpc import Listener, dial
from thinwire.wire.seal import SEAL_BYTES, KeySeal, Seal
from thinwire.wire.stream import DEFAULT_KEEPALIVE, Keepalive
from thinwire.wire.tls import Authority, Identity
from thinwire.wire.tunnel import Route, Seen, Standby, Tunnel, ping

__all__ = [
    "DEFAULT_KEEPALIVE",
    "HEADER_BYTES",
    "SEAL_BYTES",
    "Authority",
    "Door",
    "Frame",
    "FrameKind",
    "Grant",
    "Identity",
    "Keepalive",
    "KeySeal",
    "LastingPipe",
    "Limits",
    "Link",
    "LinkConfig",
    "Listener",
    "Meter",
    "Nic",
    "Pipe",
    "Route",
    "Seal",
    "Seen",
    "SocketTotals",
    "Span",
    "Standby",
    "Traffic",
    "Tunnel",
    "Unmetered",
    "decode",
    "dial",
    "encode",
    "handshake",
    "memory_pair",
    "ping",
    "raise_descriptor_limit",
    "socket_totals",
]
