"""A pipe that outlives the process at its other end: what was sent since a state is kept in a log.

A stage that is lost is built again elsewhere from its last saved state, and computes the steps
since then anew, of the frames that its neighbours sent to it. So each end of a cut keeps what it
has sent, by step. When another process takes the place of the one at the other end, both say where
they stand (`Position`): this end sends its log again from the step of that state on, and of what
the other computes anew it drops what has arrived here before. Nobody else notices.
"""

import contextlib
import hashlib
import itertools
import random
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from thinwire.background import on_daemon_thread
from thinwire.errors import BreachError, WireError
from thinwire.wire.frame import (
    HEADER_BYTES,
    BytesLike,
    Frame,
    FrameKind,
    Meter,
    decode,
    encode,
    kind_and_step,
)
from thinwire.wire.pipe import CLOSE_GRACE_S, Nic, Pipe, emulated

SEGMENT_BYTES = 16 << 20  # of a file of the log: what is no longer needed goes file by file
MOST_SAID = 1 << 20  # bytes of a position
_ANSWER_S = 30.0
_LOOK_S = 0.2  # between two looks for what a follower has not got
MOST_UNWITNESSED = 4096  # frames that wait for a follower which audits; older ones are dropped
_WHOLE_ONE_IN = 8  # witnesses have the payload, by chance; the others a digest of it
_TENSORS = (FrameKind.FORWARD, FrameKind.BACKWARD)
_WITNESSED = (*_TENSORS, FrameKind.TALLY, FrameKind.BASIS, FrameKind.ROWS)
_chance = random.SystemRandom()
GOODBYE = -1  # instead of a step, for the last frame of a link


class Entry(NamedTuple):
    """Where the log has a frame."""

    step: int
    kind: int
    file: Path
    offset: int
    length: int


class FrameLog:
    """Frames in the order in which they were sent, in files of a folder; an index in memory. A full
    disk costs the log, not the training: it reaches back no more until a later state is saved.
    """

    def __init__(self, folder: Path, limit: int, keeps: int = 0):
        """`limit`: bytes that it may have; one more, and it begins anew as after a full disk.
        `keeps`: bytes that stay although no state needs them: who begins to follow may be late.
        """
        self._folder, self._limit, self._keeps = folder, limit, keeps
        self._entries: deque[Entry] = deque()
        self._lock = threading.Lock()
        self._number, self.bytes = 0, 0  # of the file that grows, and of all frames
        self._dropped = 0  # entries before the first that is there
        self.latest = 0  # the last step of which it has a frame
        self.reach = 0  # it has all frames of this step and later ones
        self.trouble = ""
        with contextlib.suppress(OSError):
            for old in folder.glob("*.frames"):
                old.unlink()

    def add(self, step: int, kind: int, message: BytesLike) -> None:
        """Keep one more; a goodbye belongs to the last step."""
        with self._lock:
            self.latest = max(step, self.latest)
            try:
                if self.bytes + len(message) > self._limit:
                    raise OSError(f"it would be larger than {self._limit >> 20} MB")
                self._entries.append(Entry(step, kind, *self._store(message), len(message)))
                self.bytes += len(message)
            except OSError as error:
                self.trouble, self.reach = str(error), max(self.reach, self.latest + 1)
                self._drop(lambda entry: True)

    def _store(self, message: BytesLike) -> tuple[Path, int]:
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._folder / f"{self._number:06d}.frames"
        with file.open("ab") as end:
            offset = end.tell()
            end.write(message)
        if offset + len(message) >= SEGMENT_BYTES:
            self._number += 1
        return file, offset

    def after(self, count: int | None) -> tuple[int, list[Entry]]:
        """How many frames there were in all; and in order those that came after so many, or all
        that are there. WireError if some of them are there no more.
        """
        with self._lock:
            ends = self._dropped + len(self._entries)
            wanted = len(self._entries) if count is None else ends - count
            if wanted > len(self._entries):
                raise WireError("the log has dropped what the follower has not read")
            return ends, [*itertools.islice(reversed(self._entries), wanted)][::-1]

    def read(self, entry: Entry) -> bytes:
        """A frame as it was sent; WireError if the disk does not give it back."""
        try:
            with entry.file.open("rb") as file:
                file.seek(entry.offset)
                message = file.read(entry.length)
        except OSError as error:
            raise WireError(f"the log cannot be read: {error}") from error
        if len(message) != entry.length:
            raise WireError("the log was cut off")
        return message

    def trim(self, step: int) -> None:
        """A state of this step is safe: frames of earlier steps are needed no more."""
        with self._lock:
            self._drop(lambda entry: GOODBYE < entry.step < step and self.bytes > self._keeps)

    def _drop(self, is_old: Callable[[Entry], bool]) -> None:
        files = {entry.file for entry in self._entries}
        while self._entries and is_old(self._entries[0]):
            entry = self._entries.popleft()
            self.reach = max(self.reach, entry.step + 1)
            self.bytes -= entry.length
            self._dropped += 1
        current = self._folder / f"{self._number:06d}.frames"
        for file in files - {entry.file for entry in self._entries} - {current}:
            with contextlib.suppress(OSError):
                file.unlink()


class Position(msgspec.Struct, frozen=True):
    """Where one end of a link stands when the other is replaced."""

    start: int  # the step that it is at: it has all frames of earlier ones
    latest: int  # the last step that it has sent frames of
    received: list[tuple[int, int, int]]  # step and kind, and how many such frames have arrived
    decided: int = 0  # the last decision of the first stage that is known, and whether it
    stops: bool = False  # ended the run (engine/port.py numbers them)


NOWHERE = Position(0, 0, [])


class Lacking:
    """Which frames of a log an end lacks, by where it stands: called with each of them in order."""

    def __init__(self, theirs: Position = NOWHERE):
        self._start = theirs.start
        # By step and kind, for validations are cut short, and then have fewer frames:
        self._has = Counter({(step, kind): count for step, kind, count in theirs.received})

    def __call__(self, step: int, kind: int) -> bool:
        """Whether it lacks the next frame of this step and kind."""
        if GOODBYE < step < self._start:
            return False
        self._has[step, kind] -= 1
        return self._has[step, kind] < 0


class LinkState:
    """What one end of a link has sent and received, whoever was at the other end, and what follows
    from that when another takes its place: what is sent, sent again, and left out.

    `start` is the step that this end is at; with `is_new` it takes the place of a lost process. One
    that `follows` computes what another process does, from the logs of that one's neighbours, and
    sends nothing until it takes its place. `LoggedPipe` guards it.
    """

    def __init__(self, log: FrameLog, start: int = 0, is_new: bool = False, follows: bool = False):
        self.log, self.start, self.is_new, self.follows = log, start, is_new, follows
        log.reach = max(log.reach, start)
        self.theirs: Position | None = None  # once either end was replaced
        # The last step whose frames may come before they are due: the other end has sent them
        # before, or has all that it needs to send them.
        self.sent_again = sys.maxsize if follows else -1
        self.decided, self.stops = 0, False  # as of a Position
        self.said_bye = self.heard_bye = False
        self._lacks = Lacking()  # what the other end does
        self._received: Counter[tuple[int, int]] = Counter()  # by step and kind
        # Called with each frame that arrives, before it counts: a position says what follows.
        self.note: Callable[[BytesLike], None] = lambda message: None

    @property
    def holds_goodbye(self) -> bool:
        """Whether a goodbye waits: in a log it comes long before the work here ends."""
        return self.heard_bye and self.theirs is not None and not self.said_bye

    def keep(self, message: BytesLike) -> bool:
        """Log a frame that is to be written; False if the other end has it, so it need not be."""
        kind, step = kind_and_step(message)
        if kind == FrameKind.BYE:
            step, self.said_bye = GOODBYE, True
        self.log.add(step, kind, message)
        return not self.follows and self._lacks(step, kind)

    def receive(self, message: BytesLike) -> None:
        """Note a frame that has arrived."""
        kind, step = kind_and_step(message)
        if kind == FrameKind.BYE:
            step, self.heard_bye = GOODBYE, True
        self.note(message)
        self._received[step, kind] += 1

    def decide(self, number: int, stops: bool) -> None:
        """Note a decision of the first stage; one before the last was made anew, and with delayed
        updates the one to stop is followed by another.
        """
        if number >= self.decided and not self.stops:
            self.decided, self.stops = number, stops

    def position(self) -> Position:
        """Where this end stands."""
        counts = [(*which, count) for which, count in self._received.items()]
        received = [one for one in counts if one[0] >= self.start or one[0] == GOODBYE]
        return Position(self.start, self.log.latest, received, self.decided, self.stops)

    def check_reach(self, theirs: Position) -> None:
        """WireError unless the log has all frames of the step that another end is at."""
        if theirs.start < self.log.reach:
            why = f": {self.log.trouble}" if self.log.trouble else ""
            raise WireError(
                f"the log of what was sent does not reach back to step {theirs.start}{why}"
            )

    def go_on(self, theirs: Position) -> list[Entry]:
        """Another process is at the other end: what of the log is to be written to it, in order,
        before all that is kept from now on. WireError where the log does not reach back that far.
        """
        self.check_reach(theirs)
        if self.follows:
            self.follows, self.sent_again = False, -1
        self.theirs = theirs
        self._lacks = Lacking(theirs)
        if self.is_new:
            last = max((step for step, _, _ in theirs.received), default=-1)
            self.sent_again = max(self.sent_again, theirs.latest, theirs.start, last + 1)
        _, entries = self.log.after(None)
        return [entry for entry in entries if self._lacks(entry.step, entry.kind)]

    def trim(self, step: int) -> None:
        """A state of this step is safe everywhere: earlier frames are needed no more."""
        self.log.trim(step)
        for old in [one for one in self._received if GOODBYE < one[0] < min(step, self.start)]:
            del self._received[old]


def witness_of(message: BytesLike) -> bytes | None:
    """What an auditor hears of a frame that came from the stage; None: it is not audited."""
    frame = decode(message, len(message))
    if frame.kind not in _WITNESSED:
        return None
    shape, payload = frame.shape, frame.payload
    if frame.kind not in _TENSORS or _chance.random() * _WHOLE_ONE_IN >= 1:
        shape, payload = (), digest(payload)
    place = (frame.step, frame.microbatch, 0, 0)  # of no version
    return encode(Frame(FrameKind.WITNESS, frame.kind, *place, frame.codec, shape, payload))


def digest(payload: BytesLike) -> bytes:
    """What stands for a payload in a witness of it."""
    return hashlib.blake2b(payload, digest_size=16).digest()


class LoggedPipe(Pipe):
    """Joins successive processes at the other end into one pipe. When one is lost after
    `await_another` was called, reading waits until `go_on` has a pipe to another; else the loss is
    the end.
    """

    def __init__(
        self,
        pipe: Pipe | None,
        state: LinkState,
        nic: Nic | None = None,
        meter: Meter | None = None,
    ):
        """Without a pipe this end is new: `go_on` gives it one. `meter` counts what goes again."""
        self._nic, self._meter = nic, meter or Meter()
        self.fed_bytes = 0  # to followers, beside the link
        # While this end follows: hears what it would send, and witnesses of what the other sends.
        self.audit: Callable[[Frame], None] | None = None
        self._unwitnessed: list[deque[BytesLike]] = []  # by follower that audits: what has arrived
        self._writing = threading.Lock()  # frames leave in the order of the log
        self._changed = threading.Condition()  # guards all that follows
        self.state: LinkState = state
        self._pipe = emulated(pipe, nic) if pipe else None
        self._coming: Pipe | None = None  # while both ends say where they stand
        self._closed = False

    def write(self, message: BytesLike) -> None:
        self.send(message)

    def send(self, message: BytesLike) -> tuple[float, float] | None:
        """Log a frame, and write it unless the other end has it, or nobody is there."""
        if self.audit is not None:
            self.audit(decode(message, len(message)))
        now = time.monotonic()
        with self._writing:
            with self._changed:
                is_needed, pipe = self.state.keep(message), self._pipe
                self._changed.notify_all()
            try:
                if is_needed and pipe is not None:
                    return pipe.send(message)
            except WireError:
                with self._changed:
                    if pipe is self._pipe:  # else another is awaited
                        raise
        return (now, now) if is_needed else None

    def read(self) -> BytesLike | None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pipe or self._closed)
                pipe = self._pipe
            if pipe is None:
                return None
            message, loss = None, None
            try:
                message = pipe.read()
            except WireError as error:
                loss = error
            with self._changed:
                if pipe is not self._pipe:
                    continue  # of a process that was replaced meanwhile
                if message is None:
                    if self.state.heard_bye or self._closed:
                        return None
                    if self.state.follows:
                        loss = loss or WireError("the other end feeds this follower no more")
                    if loss is not None:
                        raise loss
                    return None
                if self.state.follows and kind_and_step(message)[0] == FrameKind.WITNESS:
                    if self.audit is not None:
                        self.audit(decode(message, len(message)))
                    continue
                self.state.receive(message)
                for waiting in self._unwitnessed:
                    waiting.append(message)
                self._changed.wait_for(lambda: not self.state.holds_goodbye or self._closed)
                return message

    def await_another(self) -> None:
        """The process at the other end is gone, and another will come in its place."""
        with self._changed:
            gone = [pipe for pipe in (self._pipe, self._coming) if pipe is not None]
            self._pipe = self._coming = None
            self._changed.notify_all()
        for pipe in gone:
            on_daemon_thread("thinwire close", partial(pipe.close, 0))

    def go_on(self, pipe: Pipe, is_wanted: Callable[[], bool] = lambda: True) -> None:
        """Continue with another process at the other end, or as one; both say where they stand.
        WireError where the log does not reach back to its state, or it is lost too, and `is_wanted`
        no more.
        """
        with self._writing:
            pipe, entries = self._meet(pipe, is_wanted)
            if is_over := self._closed:  # nobody else hears it, and a pipe may wait to be heard
                on_daemon_thread("thinwire rest", partial(_hear_out, pipe))
            for entry in entries:
                message = self.state.log.read(entry)
                self._meter.count_sent(FrameKind(entry.kind), len(message) - HEADER_BYTES)
                try:
                    pipe.write(message)
                except WireError:
                    if is_over:
                        break  # it may end without the rest; its loss shows elsewhere
                    raise

    def follow(self, pipe: Pipe, is_wanted: Callable[[], bool] = lambda: True) -> None:
        """Read what another process gets, until `go_on` takes its place; its feeder may change."""
        self._meet(pipe, is_wanted, follows=True)

    def _meet(
        self, pipe: Pipe, is_wanted: Callable[[], bool], follows: bool = False
    ) -> tuple[Pipe, list[Entry]]:
        """Both ends say where they stand, and this pipe counts from then on; what to send again."""
        with self._changed:
            self._coming = pipe
            is_due = is_wanted()  # whoever is given up from here on is hung up on
        theirs = NOWHERE
        if is_due:
            self._say_position(pipe)
            theirs = _position_of(pipe)
        with self._changed:
            if self._coming is not pipe or not is_wanted():
                on_daemon_thread("thinwire close", partial(pipe.close, 0))
                raise WireError("whoever was to come is lost too")
            entries = [] if follows else self.state.go_on(theirs)
            self._pipe = pipe = emulated(pipe, self._nic)
            self._coming = None
            self._changed.notify_all()
            return pipe, entries

    def feed(self, pipe: Pipe, is_audited: bool = False) -> None:
        """On a thread of its own: send the log to a process that follows the one at the other end,
        for as long as it reads; and witnesses of what comes from there, if that is audited.
        WireError once it is lost, or has fallen back behind what the log holds.
        """
        theirs = _position_of(pipe)
        self.state.check_reach(theirs)
        self._say_position(pipe)  # which the other end can rely on
        lacks, count = Lacking(theirs), None
        # It says nothing, but a pipe hears what arrived there only while it is read.
        on_daemon_thread("thinwire fed", partial(_hear_out, pipe))
        came: deque[BytesLike] = deque(maxlen=MOST_UNWITNESSED)
        if is_audited:
            with self._changed:
                self._unwitnessed.append(came)
        try:
            while not self._closed:
                count, entries = self.state.log.after(count)
                lacking = [entry for entry in entries if lacks(entry.step, entry.kind)]
                messages = map(self.state.log.read, lacking)
                witnesses = (witness_of(came.popleft()) for _ in range(len(came)))
                for message in filter(None, itertools.chain(messages, witnesses)):
                    self.fed_bytes += len(message)
                    pipe.write(message)
                with self._changed:
                    self._changed.wait(_LOOK_S)
        finally:
            with self._changed:  # by identity: two that are empty are equal
                self._unwitnessed = [one for one in self._unwitnessed if one is not came]

    def _say_position(self, pipe: Pipe) -> None:
        with self._changed:
            mine = self.state.position()
        pipe.write(msgspec.msgpack.encode(mine))

    def round_trip(self) -> float:
        pipe = self._pipe
        return pipe.round_trip() if pipe else 0.0

    def trim(self, step: int) -> None:
        """As `LinkState.trim`."""
        with self._changed:
            self.state.trim(step)

    def close(self, grace: float | None = CLOSE_GRACE_S) -> None:
        with self._changed:
            self._closed = True
            pipe = self._pipe
            self._changed.notify_all()
        if pipe is not None:
            pipe.close(grace)


def _position_of(pipe: Pipe) -> Position:
    """Where the other end says that it stands."""
    raw = pipe.read_within(_ANSWER_S)
    if raw is None or len(raw) > MOST_SAID:
        raise WireError("the other end did not say where it stands")
    try:
        theirs = msgspec.msgpack.decode(raw, type=Position)
    except msgspec.MsgspecError as error:
        raise BreachError(f"the other end did not say where it stands: {error}") from None
    if theirs.start < 0:
        raise BreachError(f"the other end says that it stands at step {theirs.start}")
    return theirs


def _hear_out(pipe: Pipe) -> None:
    """Hear what nobody needs, to the end."""
    try:
        while pipe.read() is not None:
            pass
    finally:
        pipe.close(None)
