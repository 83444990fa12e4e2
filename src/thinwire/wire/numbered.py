"""The messages of a lasting pipe: each begins with its kind, and a number or a count."""

import collections
import struct
from enum import IntEnum

from thinwire.errors import BreachError

HEAD = struct.Struct("<BQ")
LASTING_BYTES = HEAD.size
MOST_KEPT = 64 << 20  # bytes that may wait to be acknowledged before another message is taken


class Kind(IntEnum):
    """What a message on a connection of a lasting pipe is."""

    DATA = 0  # behind the head: what was written
    END = 1  # the last of its direction
    HAVE = 2  # an acknowledgement: how many messages its sender has
    OPEN = 3  # the first on a connection: the same, and who its sender is


def head_of(raw: bytes) -> tuple[int, int]:
    """The kind of a message, which may be none of ours, and its number."""
    if len(raw) < LASTING_BYTES:
        raise BreachError(f"a message of {len(raw)} bytes is shorter than a header")
    kind, number = HEAD.unpack_from(raw)
    return kind, number


class Sent:
    """What one end has to say and the other has not acknowledged, by number; from 0, in order."""

    def __init__(self) -> None:
        self.kept: collections.deque[bytes] = collections.deque()
        self._bytes = 0
        self._first = 0  # the number of the first that is kept
        self._next = 0  # the number of the next to write on this connection

    def has_room(self) -> bool:
        """Whether all is on the connection, and not too much of it is kept."""
        return not self.unwritten() and self._bytes < MOST_KEPT

    def unwritten(self) -> int:
        """How many messages this connection has not carried."""
        return self._first + len(self.kept) - self._next

    def add(self, kind: Kind, message: bytes) -> None:
        """Give a message its number."""
        self.kept.append(HEAD.pack(kind, self._first + len(self.kept)) + message)
        self._bytes += len(self.kept[-1])

    def next(self) -> bytes:
        """The next to write."""
        self._next += 1
        return self.kept[self._next - 1 - self._first]

    def rewind(self) -> None:
        """There is another connection: on it all that is kept is written again."""
        self._next = self._first

    def forget(self, count: int) -> None:
        """The other end has so many messages: they need not be kept."""
        known = self._first + len(self.kept)
        if count > known:
            raise BreachError(f"{count} messages are acknowledged, but only {known} were sent")
        while self._first < count:
            self._bytes -= len(self.kept.popleft())
            self._first += 1
        self._next = max(self._next, self._first)
