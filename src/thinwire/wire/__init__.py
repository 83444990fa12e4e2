"""The wire: frames between stages, over TLS between proven keys, metered and never blocking.

See docs/wire.md for the format and the model of the emulated network.
"""

from thinwire.wire.door import Door, Grant, Route, Routes, Seen, Standby, Traffic, ping, ping_all
from thinwire.wire.frame import HEADER_BYTES, Frame, FrameKind, Meter, Unmetered, decode, encode
from thinwire.wire.keys import Identity
from thinwire.wire.lasting import LastingPipe
from thinwire.wire.link import Link, LinkConfig, Span, handshake
from thinwire.wire.logged import FrameLog, LinkState, LoggedPipe, Position
from thinwire.wire.pipe import Nic, Pipe, emulated, memory_pair
from thinwire.wire.sockets import raise_descriptor_limit
from thinwire.wire.stream import Listener, dial
