"""Files that travel in pieces: one end asks for them, the other gives them.

The taker says which file it wants and what it has of it already; the giver sends the rest, or says
why it cannot. What has arrived is kept in a part file, so a transfer whose connection was lost goes
on where it stopped, also in another process. Only a whole file with the right hash gets its name.

Both directions of a run's files use this: shards to the host (store.py), and what a seat needs from
the host (fetch.py). A pipe carries one request at a time, and need not be a lasting one.
"""

import re
import shutil
import threading
import time
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.engine.checkpoint import sha256_of
from thinwire.errors import BreachError, CheckpointError, WireError, printable
from thinwire.folders import flush
from thinwire.run.vocabulary import Vocabulary
from thinwire.typed import Exact
from thinwire.wire import Frame, FrameKind, Meter, Pipe, decode, encode
from thinwire.wire.background import on_daemon_thread
from thinwire.wire.frame import BytesLike

PIECE_BYTES = 256 << 10
MOST_SAID = 8 << 20  # bytes of a message; that of a seat lists the tensors of its files
SPARE_BYTES = 64 << 20  # of the disk that a transfer leaves free
SILENCE_S = 120.0  # without a piece, after which the connection is given up
LEAST_RATE = 4 * PIECE_BYTES / SILENCE_S  # bytes per second: slower would be taken for silence
_HASH = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Want:
    """Asks for a file from `offset` on; step and stage say which one it is to those who hold it."""

    step: int
    stage: int
    sha256: Exact
    bytes: int
    offset: int


@dataclass(frozen=True)
class Refusal:
    """Why the other end cannot have what it asked for."""

    reason: str


@dataclass(frozen=True)
class Done:
    """The checkpoint of this step is complete: shards of earlier steps are of no more use."""

    step: int


@dataclass(frozen=True)
class Dropped:
    """The checkpoint of this step was given up: nobody will ask for its shard."""

    step: int


@dataclass(frozen=True)
class AskSeat:
    """Asks which files a stage needs."""

    stage: int


@dataclass(frozen=True)
class Seat:
    """The manifest of a checkpoint that holds just what one stage needs."""

    manifest: dict[str, Any]


Word = Want | Refusal | Done | Dropped | AskSeat | Seat
_WORDS = Vocabulary(
    {
        "want": Want,
        "refusal": Refusal,
        "done": Done,
        "dropped": Dropped,
        "ask_seat": AskSeat,
        "seat": Seat,
    }
)


class Talk:
    """Words and pieces over a pipe, one after the other; what arrives is checked, all is billed."""

    def __init__(self, pipe: Pipe, meter: Meter | None = None):
        self._pipe = pipe
        self.meter = meter or Meter()

    def say(self, word: Word) -> None:
        """Send a word."""
        self.send(Frame(FrameKind.CONTROL, payload=_WORDS.pack(word)))

    def send(self, frame: Frame) -> None:
        """Send a frame; waits while the transport is full."""
        message = encode(frame)
        # Before it goes, as on a link: what the other end has got is counted here.
        self.meter.count_sent(frame.kind, memoryview(frame.payload).nbytes)
        self._pipe.write(message)

    def hear(self, timeout: float | None = None) -> Word | Frame | None:
        """The next word or piece; None if the other end closed, WireError if nothing comes."""
        raw = self._pipe.read() if timeout is None else self._read_within(timeout)
        if raw is None:
            return None
        try:
            frame = decode(raw, MOST_SAID)
            self.meter.count_received(frame.kind, memoryview(frame.payload).nbytes)
            if frame.kind is FrameKind.PIECE:
                return frame
            if frame.kind is not FrameKind.CONTROL:
                raise WireError(f"a {frame.kind.name} frame came among files")
            return _WORDS.unpack(bytes(frame.payload))
        except WireError as error:
            raise BreachError(str(error)) from None

    def close(self) -> None:
        """End both directions."""
        self._pipe.close()

    def _read_within(self, timeout: float) -> BytesLike | None:
        reading = on_daemon_thread("thinwire pieces", self._pipe.read)
        try:
            return reading.result(timeout)
        except futures.TimeoutError:
            on_daemon_thread("thinwire close", self._pipe.close)  # which ends that thread too
            raise WireError(f"the other end said nothing for {timeout:g} s") from None


class Pace:
    """Holds senders back to a rate, in bytes per second over all of them; 0 = as fast as it goes.

    The rate may change at any time: it is the share of an uplink that training leaves to files,
    and all of it when training is over. A piece goes out whole, so short bursts are that large.
    No rate is below `least`.
    """

    def __init__(
        self,
        bytes_per_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        least: float = LEAST_RATE,
    ):
        self._least = least
        self._rate = self._bounded(bytes_per_s)
        self._clock, self._sleep = clock, sleep
        self._lock = threading.Lock()
        self._free_at = 0.0  # when all that was spent so far has passed

    def change(self, bytes_per_s: float) -> None:
        """Set another rate, for what is sent from now on."""
        with self._lock:
            self._rate = self._bounded(bytes_per_s)
            self._free_at = min(self._free_at, self._clock())

    def _bounded(self, bytes_per_s: float) -> float:
        return max(bytes_per_s, self._least) if bytes_per_s > 0 else 0.0

    def spend(self, size: int) -> None:
        """Wait until `size` more bytes may be sent."""
        with self._lock:
            if self._rate <= 0:
                return
            now = self._clock()
            start = max(now, self._free_at)
            self._free_at = start + size / self._rate
        if start > now:
            self._sleep(start - now)


def give(talk: Talk, want: Want, path: Path, pace: Pace) -> None:
    """Send the file at `path` from the offset asked for, or say why not."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size != want.bytes or not 0 <= want.offset <= size or want.offset % PIECE_BYTES:
                talk.say(Refusal(f"{path.name} of step {want.step} has {size} bytes"))
                return
            for offset in range(file.seek(want.offset), size, PIECE_BYTES):
                piece = file.read(PIECE_BYTES)
                if len(piece) != min(PIECE_BYTES, size - offset):
                    talk.say(Refusal(f"{path.name} of step {want.step} was changed meanwhile"))
                    return
                pace.spend(len(piece))
                number = offset // PIECE_BYTES
                talk.send(Frame(FrameKind.PIECE, want.stage, number, payload=piece))
    except OSError as error:
        reason = error.strerror or type(error).__name__
        talk.say(Refusal(f"{path.name} of step {want.step} cannot be read: {reason}"))


def take(
    talk: Talk,
    want: Want,
    part: Path,
    progress: Callable[[int], None] = lambda done: None,
    silence: float = SILENCE_S,
) -> None:
    """Complete `part` until it is the file that is wanted, with the right hash.

    A wrong hash is sent again once; then, or when the disk is full, or the other end refuses,
    CheckpointError says so. WireError: the connection is lost, and `part` holds what has come.
    """
    if not _HASH.fullmatch(want.sha256):
        raise CheckpointError(f"{printable(want.sha256, 80)!r} is no sha256 of a file")
    for attempt in ("first", "second"):
        try:
            _complete(talk, want, part, progress, silence)
            found = sha256_of(part)
        except OSError as error:
            raise CheckpointError(
                f"{want.bytes:,} bytes cannot be written to {part}: {error.strerror}"
            ) from error
        if found == want.sha256:
            return
        part.unlink()
        reason = f"it arrived with the hash {found[:12]} instead of {want.sha256[:12]}"
        if attempt == "second":
            raise CheckpointError(f"{reason}, twice")


def _complete(
    talk: Talk, want: Want, part: Path, progress: Callable[[int], None], silence: float
) -> None:
    part.parent.mkdir(parents=True, exist_ok=True)
    with part.open("ab") as file:
        have = file.seek(0, 2)
        have = 0 if have > want.bytes else have
        if have < want.bytes:
            have -= have % PIECE_BYTES
        file.truncate(have)
        file.seek(have)
        _check_room(part.parent, want.bytes - have)
        progress(have)
        if have < want.bytes:
            talk.say(Want(want.step, want.stage, want.sha256, want.bytes, have))
        while have < want.bytes:
            piece = _next_piece(talk, want, have, silence)
            file.write(piece)
            have += len(piece)
            progress(have)
    flush(part)


def _next_piece(talk: Talk, want: Want, have: int, silence: float) -> memoryview:
    heard = talk.hear(silence)
    if heard is None:
        raise WireError("the other end closed the connection in the middle of a file")
    if isinstance(heard, Refusal):
        raise CheckpointError(f"the other end does not send it: {heard.reason}")
    due = min(PIECE_BYTES, want.bytes - have)
    if not isinstance(heard, Frame) or heard.step != have // PIECE_BYTES:
        raise BreachError("the other end sent another piece than the one that was due")
    piece = memoryview(heard.payload)
    if piece.nbytes != due:
        raise BreachError(f"the other end sent a piece of {piece.nbytes} bytes, not {due}")
    return piece


def _check_room(folder: Path, size: int) -> None:
    free = shutil.disk_usage(folder).free
    if size + SPARE_BYTES > free:
        raise CheckpointError(
            f"{size:,} bytes do not fit into {folder}: {free:,} are free there, and "
            f"{SPARE_BYTES >> 20} MiB are to stay free. Free some space"
        )
