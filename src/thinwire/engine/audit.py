"""Audits: a process that follows a stage holds what that stage sent against what it computes.

The neighbours of the stage send a witness of each tensor that came from it: a digest, and of some,
which nobody can foresee, the payload itself. A machine of the same kind computes the same bits.
Another one drifts away step by step: there what differs far more than all before is no rounding.
"""

import threading
from collections import Counter
from collections.abc import Callable

from thinwire.engine.cut import LEGS, Ends
from thinwire.engine.reports import Audited, Named
from thinwire.errors import WireError
from thinwire.wire import Frame, FrameKind
from thinwire.wire.logged import digest

MOST_ROUNDING = 0.04  # of a tensor's norm: more is never taken for rounding
LEAST_ROUNDING = 0.002  # less always is: a codec makes more of what falls between two values
FACTOR = 10.0  # times the largest difference so far may be rounding too
IN_A_ROW = 3  # tensors of a kind differ by more where a machine lies; one alone may be chance
DRIFTED = MOST_ROUNDING / 4  # whoever is so far away may soon be further: it is to begin anew
MOST_WAITING = 64 << 20  # bytes of payloads whose counterpart has not come yet
ITEM_BYTES = 64  # of one of them beside its payload
_NAMES: dict[FrameKind, Named] = {
    FrameKind.FORWARD: "activation",
    FrameKind.BACKWARD: "gradient",
    FrameKind.TALLY: "tally",
    FrameKind.BASIS: "basis",
    FrameKind.ROWS: "rows",
}


class Audit:
    """What one process has computed in a stage's place, and what the neighbours got from it.
    `ends` are its ends of its cuts. The first difference is told.
    """

    def __init__(self, ends: Ends, is_exact: bool, tell: Callable[[Audited], None]):
        self._ends = dict(zip((FrameKind.BACKWARD, FrameKind.FORWARD), ends, strict=True))
        self._is_exact, self._tell = is_exact, tell
        self._lock = threading.Lock()
        self._waiting = _Waiting(), _Waiting()  # what was computed, and witnesses
        self._compared = self._step = 0
        self._largest = 0.0
        self._beyond: Counter[FrameKind] = Counter()  # in a row
        self._tolerance = 0.0 if is_exact else MOST_ROUNDING
        self._has_told = False

    def hear(self, frame: Frame) -> None:
        """A frame that this process would send as the stage, or a witness of what that sent."""
        is_witness = frame.kind is FrameKind.WITNESS
        if (kind := frame.sender if is_witness else frame.kind) not in _NAMES:
            return
        key = FrameKind(kind), frame.step, frame.microbatch
        item = bool(frame.shape), bytes(frame.payload)
        with self._lock:
            other = self._waiting[not is_witness].take(key)
            if other is None:
                self._waiting[is_witness].put(key, item)
                return
            (_, ours), (is_whole, theirs) = (other, item) if is_witness else (item, other)
            found = self._compare(key, ours, theirs, is_whole)
        if found is not None:
            self._tell(found)

    def standing(self) -> Audited:
        """How many tensors were compared, up to which step, and how they differed."""
        with self._lock:
            return Audited(self._step, self._compared, self._largest, self._tolerance)

    def _compare(self, key: "Key", ours: bytes, theirs: bytes, is_whole: bool) -> Audited | None:
        """What is to be told, if anything."""
        kind, step, microbatch = key
        is_equal = (ours if is_whole else digest(ours)) == theirs
        difference = 0.0
        if not is_equal:
            difference = self._difference(key, ours, theirs) if is_whole else -1.0
            if difference < 0 and not self._is_exact:
                return None  # such a payload says nothing to those who round otherwise
        self._compared, self._step = self._compared + 1, max(self._step, step)
        if is_equal or (not self._is_exact and difference <= self._tolerance):
            self._beyond[kind] = 0
            self._largest = max(self._largest, difference)
            if not self._is_exact and self._largest:
                likely = max(LEAST_ROUNDING, FACTOR * self._largest)
                self._tolerance = min(MOST_ROUNDING, likely)
            return None
        self._beyond[kind] += 1
        if self._has_told or (not self._is_exact and self._beyond[kind] < IN_A_ROW):
            return None
        self._has_told = True
        how = self._compared, max(0.0, difference), self._tolerance
        return Audited(step, *how, _NAMES[kind], microbatch)

    def _difference(self, key: "Key", ours: bytes, theirs: bytes) -> float:
        """Of two payloads, relative to the norm of ours; -1 where they cannot be compared."""
        kind, step, microbatch = key
        end = self._ends.get(kind)
        if end is None:
            return -1.0
        leg = LEGS[kind]
        # Not as in training: then the codec would remember them.
        place = end.place(leg, step, microbatch, training=False)
        try:
            a, b = (end.codecs[leg].unpack(one, end.spec, place).double() for one in (ours, theirs))
        except WireError:
            return -1.0
        return min(1e9, float((a - b).norm() / a.norm().clamp_min(1e-30)))


Key = tuple[FrameKind, int, int]
Item = tuple[bool, bytes]  # a payload, whole or a digest of it


class _Waiting:
    """Payloads whose counterpart has not come yet; the oldest are dropped where they are many."""

    def __init__(self) -> None:
        self._items: dict[Key, Item] = {}
        self._bytes = 0

    def put(self, key: Key, item: Item) -> None:
        self._items[key] = item
        self._bytes += ITEM_BYTES + len(item[1])
        while self._bytes > MOST_WAITING:
            self.take(next(iter(self._items)))

    def take(self, key: Key) -> Item | None:
        item = self._items.pop(key, None)
        if item is not None:
            self._bytes -= ITEM_BYTES + len(item[1])
        return item
