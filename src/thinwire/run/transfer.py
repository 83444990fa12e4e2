"""Files that travel between a host and its peers: in pieces, resumable, hashed, at a bounded rate.

One end says which file it wants and from where on (`take`); the other sends the rest, or says why
not (`serve_files`). What has arrived is kept in a part file, also for another process.

- *Shards to the host*, which fetches them while training goes on (`ShardCollector`), at a bounded
  share of the member's uplink (`ShardSender`): those of one step at a time, then the newest.
- *The state of a stage to who takes its seat* (`SeatServer`, `fetch_seat`): its own stage's file,
  and of others only the tensors that it needs. What this machine has already is not sent again.
"""

import collections
import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import safetensors
from safetensors.torch import save_file

from thinwire.engine import checkpoint as ck
from thinwire.engine.reports import ShardWritten
from thinwire.engine.state import names_for_stage
from thinwire.errors import BreachError, CheckpointError, ConfigError, WireError, printable
from thinwire.folders import flush, put_in_place, write_file
from thinwire.run.events import Travelled
from thinwire.run.machine import free_disk
from thinwire.run.protocol import OF_NO_STEP
from thinwire.settings import Settings
from thinwire.wire import Frame, FrameKind, Meter, Pipe, decode, encode
from thinwire.wire.door import Allowance

PIECE_BYTES = 256 << 10
MOST_SAID = 8 << 20  # bytes of a message; that of a seat lists the tensors of its files
SPARE_BYTES = 64 << 20  # of the disk that a transfer leaves free
SILENCE_S = 120.0  # without a piece, after which the connection is given up
LEAST_MBPS = 4 * PIECE_BYTES / SILENCE_S * 8e-6  # slower would be taken for silence
REDIAL_S = 2.0  # between two attempts
KEPT_SHARDS = 4  # that a member keeps for a host which asks for none of them


class Want(msgspec.Struct, frozen=True, tag=True):
    """Asks for a file from `offset` on; step and stage say which one it is to those who hold it."""

    step: ck.Count
    stage: ck.Count
    sha256: ck.Hash
    bytes: ck.Count
    offset: ck.Count = 0


class Refusal(msgspec.Struct, frozen=True, tag=True):
    """Why the other end cannot have what it asked for."""

    reason: str


class SeatFiles(msgspec.Struct, frozen=True, tag=True):
    """The manifest of a checkpoint that holds just what one stage needs."""

    manifest: dict[str, Any]


class OtherContentError(CheckpointError):
    """What arrived is not what the other end said it would send."""


Word = Want | Refusal | SeatFiles
T = TypeVar("T", Frame, SeatFiles)
_WORDS = msgspec.json.Decoder(Word)


class Talk:
    """Words and pieces over a pipe, one after the other; what arrives is checked, all is billed."""

    def __init__(self, pipe: Pipe, meter: Meter | None = None):
        self._pipe, self.meter = pipe, meter or Meter()

    def say(self, word: Word) -> None:
        """Send a word."""
        self.send(Frame(FrameKind.CONTROL, payload=msgspec.json.encode(word)))

    def send(self, frame: Frame) -> None:
        """Send a frame; waits while the transport is full."""
        message = encode(frame)
        # Before it goes: what the other end has got is counted here.
        self.meter.count_sent(frame.kind, memoryview(frame.payload).nbytes)
        self._pipe.write(message)

    def hear(self, timeout: float | None = None) -> Word | Frame | None:
        """The next word or piece; None if the other end closed, WireError if nothing comes."""
        if (raw := self._pipe.read_within(timeout)) is None:
            return None
        try:
            frame = decode(raw, MOST_SAID)
            self.meter.count_received(frame.kind, memoryview(frame.payload).nbytes)
            if frame.kind is FrameKind.PIECE:
                return frame
            if frame.kind is not FrameKind.CONTROL:
                raise WireError(f"a {frame.kind.name} frame came among files")
            return _WORDS.decode(frame.payload)
        except (WireError, msgspec.MsgspecError, RecursionError) as error:
            reason = printable(str(error), 200)
            raise BreachError(f"what came among files cannot be read: {reason}") from None

    def expect(self, kind: type[T], what: str, timeout: float | None = None) -> T:
        """The next word or piece, which must be of this kind; CheckpointError if it is refused."""
        heard = self.hear(timeout)
        if heard is None:
            raise WireError(f"the other end closed the connection before it sent {what}")
        if isinstance(heard, Refusal):
            raise CheckpointError(f"the other end does not send it: {printable(heard.reason, 500)}")
        if not isinstance(heard, kind):
            raise BreachError(f"the other end sent something else than {what}")
        return heard


def uplink_share(mbps: float) -> float:
    """A rate for files, in Mbit/s: none is so low that it passes for silence; 0 is no bound."""
    return max(mbps, LEAST_MBPS) if mbps > 0 else 0.0


def serve_files(talk: Talk, find: Callable[[Want], Path], rate: Allowance | None = None) -> None:
    """Send what the other end asks for, or say why not, until it closes; WireError if that breaks.
    `rate` may change at any time: it is the share of an uplink that training leaves to files.
    """
    while (want := talk.hear()) is not None:
        if not isinstance(want, Want):
            raise BreachError("a file was not asked for but sent")
        try:
            _give(talk, want, find(want), rate)
        except OSError as error:
            which = f"the file of stage {want.stage} and step {want.step}"
            talk.say(Refusal(f"{which} cannot be had: {error.strerror}"))


def _give(talk: Talk, want: Want, path: Path, rate: Allowance | None) -> None:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        if size != want.bytes or want.offset > size or want.offset % PIECE_BYTES:
            raise OSError(0, f"it has {size} bytes")
        for offset in range(file.seek(want.offset), size, PIECE_BYTES):
            piece = file.read(PIECE_BYTES)
            if len(piece) != min(PIECE_BYTES, size - offset):
                raise OSError(0, "it was changed meanwhile")
            if rate is not None:
                time.sleep(rate.book(len(piece), time.monotonic()))
            number = offset // PIECE_BYTES
            talk.send(Frame(FrameKind.PIECE, want.stage, number, payload=piece))


def take(
    talk: Talk, want: Want, part: Path, progress: Callable[[int], None] = lambda done: None
) -> None:
    """Complete `part` until it is the file that is wanted, which may be sent twice; CheckpointError
    says why that cannot be. WireError: the connection is lost, and `part` holds what has come.
    """
    for _ in ("first", "second"):
        _complete(talk, want, part, progress)
        if (found := ck.sha256_of(part)) == want.sha256:
            return
        part.unlink()
    hashes = f"{found[:12]} instead of {want.sha256[:12]}"
    raise OtherContentError(f"it arrived with the hash {hashes}, twice")


def _complete(talk: Talk, want: Want, part: Path, progress: Callable[[int], None]) -> None:
    part.parent.mkdir(parents=True, exist_ok=True)
    with part.open("ab") as file:
        have = file.tell() if file.tell() <= want.bytes else 0
        if have < want.bytes:
            have -= have % PIECE_BYTES
        file.truncate(have)
        rest, free = want.bytes - have, shutil.disk_usage(part.parent).free
        if rest and rest + SPARE_BYTES > free:
            what = f"{rest:,} bytes do not fit into {part.parent}: {free:,} are free"
            raise CheckpointError(f"{what}, and {SPARE_BYTES:,} stay so. Free some space")
        progress(have)
        if rest:
            talk.say(msgspec.structs.replace(want, offset=have))
        while have < want.bytes:
            piece = talk.expect(Frame, "the rest of a file", SILENCE_S)
            due = have // PIECE_BYTES, min(PIECE_BYTES, want.bytes - have)
            if (piece.step, len(piece.payload)) != due:
                raise BreachError("the other end sent another piece than the one that was due")
            have += file.write(piece.payload)
            progress(have)
    flush(part)


def _link_or_copy(source: Path, target: Path) -> None:
    """The same file under another name, or a copy where a disk has no such names."""
    target.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        os.link(source, target)
        return
    shutil.copyfile(source, target)


def incoming_folder(run_folder: Path) -> Path:
    """Where the host keeps what has arrived of shards, by names that no peer chooses."""
    return ck.checkpoints_folder(run_folder) / ".incoming"


def _shard_file(run_folder: Path, step: int, stage: int) -> Path:
    return ck.partial_folder(run_folder, step) / f"stage-{stage}.safetensors"


@dataclass
class ShardCollector:
    """On the host: fetches the shards of one epoch, one checkpoint after the other.
    `limits`: the most bytes of each stage's shard. `objection_to`: why a file is not the part that
    a stage has reported. `tell` hears what becomes of each, for the coordinator. `patience`:
    seconds without a byte of the checkpoint under way, before it is given up; 0 = never.
    `on_progress` gets the bytes of all its shards that are here, and in all.
    """

    run_folder: Path
    limits: Sequence[int]
    objection_to: Callable[[int, ShardWritten, Path], str]
    tell: Callable[[Travelled], None]
    patience: float = 900.0
    meter: Meter = field(default_factory=Meter)
    on_progress: Callable[[int, int], None] = lambda done, total: None
    _changed: threading.Condition = field(default_factory=threading.Condition)  # guards the rest
    # By step and stage, shards that are not here; None: others hold the stage, and write another.
    _due: dict[int, dict[int, ShardWritten | None]] = field(default_factory=dict)
    _given_up: dict[int, str] = field(default_factory=dict)  # steps, also of parts to come: why
    _current: int = OF_NO_STEP  # whose shards travel
    _total: int = 0  # bytes of all its shards
    _have: dict[int, int] = field(default_factory=dict)  # ... that are here, by stage
    _closed: bool = False
    _moved_at: float = 0.0

    def __post_init__(self) -> None:
        self._incoming = incoming_folder(self.run_folder)
        self._fetching = [threading.Lock() for _ in self.limits]  # one at a time writes a part
        if self.patience:
            threading.Thread(target=self._watch, name="thinwire shards", daemon=True).start()

    def announce(self, stage: int, written: ShardWritten) -> None:
        """A stage says that it has written its shard of a step."""
        step, size, most = written.step, written.shard.bytes, self.limits[stage]
        with self._changed:
            due = self._due.setdefault(step, {})
            if step != self._current or stage in due:  # else it is here, of who held the stage
                due[stage] = written
            if not 0 < size <= most:
                reported = f"stage {stage} reported a shard of {size:,} bytes"
                objection = f"{reported}, but its state takes at most {most:,}"
                self.tell(Travelled(stage, step, objection, at_fault=True))
                self._given_up.setdefault(step, objection)
            if step in self._given_up:
                self.give_up(step, self._given_up[step])
            self._choose()

    def give_up(self, step: int, reason: str) -> None:
        """The checkpoint of a step cannot be had: fetch none of its shards."""
        with self._changed:
            self._given_up.setdefault(step, reason)
            due = self._due.pop(step, {})
            for stage in sorted(stage for stage, written in due.items() if written):
                self.tell(Travelled(stage, step, reason))
            if step == self._current:
                self._current = OF_NO_STEP
            self._choose()

    def retract(self, stages: Collection[int]) -> None:
        """Others hold these stages now: what was not fetched, they write and announce again."""
        with self._changed:
            for due in self._due.values():
                due.update(dict.fromkeys(due.keys() & {*stages}))

    def forget(self) -> None:
        """The run is complete: nothing that has arrived of shards is of use any more."""
        shutil.rmtree(self._incoming, ignore_errors=True)

    def close(self) -> None:
        """Fetch nothing more; what has arrived stays for a later epoch."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def collect_from(self, member: str, held: Callable[[], list[int]], pipe: Pipe) -> None:
        """Fetch the shards of what it holds, until the connection is lost or all is over."""
        talk = Talk(pipe, self.meter)
        try:
            while (job := self._next_job(held)) is not None:
                with self._fetching[job[0]]:
                    self._fetch(talk, member, *job)
        except WireError:
            return  # the member dials again
        finally:
            pipe.close(0)

    def _next_job(self, held: Callable[[], list[int]]) -> tuple[int, ShardWritten] | None:
        """The shard that a member is asked for next; None once all is over."""
        with self._changed:
            while not self._closed:
                due = self._due.get(self._current, {})
                for stage in sorted(held()):
                    if written := due.get(stage):
                        return stage, written
                self._changed.wait()
            return None

    def _fetch(self, talk: Talk, member: str, stage: int, written: ShardWritten) -> None:
        """Fetch a shard, open it, and put it where its checkpoint is made; or say why not."""
        step, shard, whose = written.step, written.shard, f"the shard of stage {stage}"
        part = self._incoming / f"stage-{stage}-{shard.sha256}.part"
        try:
            for other in {*self._incoming.glob(f"stage-{stage}-*.part")} - {part}:
                other.unlink()
            want = Want(step, stage, shard.sha256, shard.bytes)
            take(talk, want, part, lambda done: self._note_progress(step, stage, done))
            if refused := self.objection_to(stage, written, part):
                part.unlink()
                raise OtherContentError(f"it is not its state: {refused}")
            place = _shard_file(self.run_folder, step, stage)
            place.parent.mkdir(parents=True, exist_ok=True)
            _link_or_copy(part, place)  # it stays, in case this epoch ends before the others came
        except (CheckpointError, ConfigError) as error:
            reason = f"{whose} from {member}: {error}"
            if isinstance(error, OtherContentError):
                self.tell(Travelled(stage, step, reason, at_fault=True))
            self.give_up(step, reason)
        except OSError as error:
            self.give_up(step, f"{whose} cannot be kept: {error}")
        else:
            with self._changed:
                due = self._due.get(step, {})
                if due.get(stage) is not written:
                    return  # of who held the stage before
                del due[stage]
                self.tell(Travelled(stage, step))
                if not due:
                    del self._due[step]
                    self._current = OF_NO_STEP
                    self._choose()

    def _choose(self) -> None:
        """If none is under way: the newest checkpoint of which all stages have written theirs."""
        every = len(self.limits)
        whole = [step for step, due in self._due.items() if sum(map(bool, due.values())) == every]
        if self._current == OF_NO_STEP and whole:
            self._current, self._moved_at = max(whole), time.monotonic()
            parts = filter(None, self._due[self._current].values())
            self._have, self._total = {}, sum(part.shard.bytes for part in parts)
            for older in sorted(step for step in self._due if step < self._current):
                why = f"that of step {self._current} came due before it could be sent"
                self.give_up(older, why)
        self._changed.notify_all()

    def _note_progress(self, step: int, stage: int, done: int) -> None:
        with self._changed:
            self._moved_at = time.monotonic()
            if step != self._current or self._closed:
                # The rest would keep the uplink from what is wanted now; the member dials again.
                raise WireError(f"the checkpoint of step {step} is no longer waited for")
            self._have[stage] = done
            here = sum(self._have.values())
        self.on_progress(here, self._total)

    def _watch(self) -> None:
        """Give a checkpoint up of which nothing has come for too long."""
        with self._changed:
            while not self._closed:
                self._changed.wait(min(1.0, self.patience / 4))
                quiet = time.monotonic() - self._moved_at
                if (due := self._due.get(self._current)) and quiet > self.patience:
                    which = ", ".join(f"stage {stage}" for stage in sorted(due))
                    reason = f"nothing of the shard of {which} has come for {quiet:.0f} s"
                    self.give_up(self._current, reason)


class ShardSender:
    """On a member: gives the host the shards that its stages wrote, and keeps few of them."""

    def __init__(self, run_folder: Path, rate: Allowance | None = None):
        self.meter = Meter()
        self._run_folder, self._rate = run_folder, rate
        self._closed = threading.Event()
        self._pipe: Pipe | None = None
        self._wanted: collections.deque[int] = collections.deque(maxlen=2)  # steps, the last

    def keep_serving(self, connect: Callable[[], Pipe]) -> None:
        """Serve one connection after the other until `close`; on a thread of its own."""
        while not self._closed.is_set():
            with contextlib.suppress(WireError):
                self.serve(connect())
            self._closed.wait(REDIAL_S)

    def serve(self, pipe: Pipe) -> None:
        """Answer the host until this connection ends; WireError if it breaks."""
        self._pipe = pipe
        try:
            serve_files(Talk(pipe, self.meter), self._find, self._rate)
        finally:
            pipe.close(0)

    def close(self) -> None:
        """End, with whatever connection there is."""
        self._closed.set()
        if self._pipe is not None:
            self._pipe.close(0)

    def remove_spare(self) -> None:
        """Remove what no host needs: all shards but the newest few, and those that travel."""
        wanted = {ck.partial_folder(self._run_folder, step) for step in [*self._wanted]}
        with contextlib.suppress(OSError):  # one has just been removed: look again later
            found = ck.checkpoints_folder(self._run_folder).glob(f".partial-step-{8 * '[0-9]'}")
            by_age = sorted(found, key=lambda folder: folder.stat().st_mtime_ns)
            for folder in {*by_age[:-KEPT_SHARDS]} - wanted:
                shutil.rmtree(folder, ignore_errors=True)

    def _find(self, want: Want) -> Path:
        if want.step not in [*self._wanted][-1:]:
            self._wanted.append(want.step)
            self.remove_spare()
        return _shard_file(self._run_folder, want.step, want.stage)


@dataclass
class SeatServer:
    """On the host: says which files each stage needs of a checkpoint, and sends them. Once a run
    that goes on has removed it, `on_gone` is called, and the connection ends.
    """

    checkpoint: ck.Checkpoint
    settings: Settings
    meter: Meter = field(default_factory=Meter)
    on_gone: Callable[[], None] | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    # By its stages, the files of a seat, and what a manifest says of them.
    _seats: dict[tuple[int, ...], dict[Path, ck.Shard]] = field(default_factory=dict)

    def serve(self, pipe: Pipe, stages: tuple[int, ...]) -> None:
        """Tell the member of these stages what it needs, and send it; WireError if that breaks."""
        talk = Talk(pipe, self.meter)

        def find(want: Want) -> Path:
            self._look()
            for path, shard in self._seats.get(stages, {}).items():
                if shard.sha256 == want.sha256:
                    return path
            raise FileNotFoundError(0, "it is not of that seat")

        try:
            seat = self._seat(stages)
            self._look()
            talk.say(seat)
            serve_files(talk, find)
        finally:
            pipe.close(0)

    def _look(self) -> None:
        """WireError where the checkpoint is kept no more."""
        if self.on_gone is not None and not self.checkpoint.folder.is_dir():
            self.on_gone()
            raise WireError(f"the checkpoint of step {self.checkpoint.step} is kept no more")

    @property
    def _extracts(self) -> Path:
        folder = self.checkpoint.folder.resolve()
        return folder.with_name(f".extracts-{folder.name}")

    def close(self) -> None:
        """Remove what was extracted."""
        shutil.rmtree(self._extracts, ignore_errors=True)

    def _seat(self, stages: tuple[int, ...]) -> SeatFiles | Refusal:
        try:
            with self._lock:
                if stages not in self._seats:
                    names = self.checkpoint.names()
                    needed = (names_for_stage(self.settings, stage, names) for stage in stages)
                    self._seats[stages] = dict(self._files(stages[0], set().union(*needed)))
        except (CheckpointError, OSError, safetensors.SafetensorError) as error:
            return Refusal(f"the host cannot read its checkpoint: {error}")
        left_out = ("tokenizer_sha256", "template_sha256")
        kept = {k: v for k, v in self.checkpoint.manifest.items() if k not in left_out}
        kept["shards"] = [vars(shard) for shard in self._seats[stages].values()]
        return SeatFiles(ck.sealed(kept))

    def _files(self, stage: int, needed: set[str]) -> Iterator[tuple[Path, ck.Shard]]:
        """The files that hold what stages need; of those that hold more, just that."""
        for shard in self.checkpoint.shards:
            whole, names = self.checkpoint.folder / shard.file, sorted(needed & {*shard.tensors})
            if len(names) == len(shard.tensors):
                yield whole, shard
            elif names:
                path = self._extracts / str(stage) / shard.file
                path.parent.mkdir(parents=True, exist_ok=True)
                with safetensors.safe_open(whole, framework="pt") as file:
                    save_file({name: file.get_tensor(name) for name in names}, path)
                yield path, ck.Shard(shard.file, ck.sha256_of(path), path.stat().st_size, names)


def fetch_seat(
    pipe: Pipe,
    stages: Collection[int],
    run_folder: Path,
    limit: int,
    plugins: Collection[str] = (),
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Path:
    """Fetch what stages need of the host's checkpoint, no more than `limit` bytes and no plugins
    but these; returns a folder to resume from. `progress` gets the bytes that are here, and in all.
    What was fetched before a lost connection (WireError) is used the next time.
    """
    talk = Talk(pipe)
    try:
        manifest = talk.expect(SeatFiles, "what this seat needs").manifest
        shards = _checked_manifest(manifest, plugins)
        which = ", ".join(map(str, stages))
        if (size := sum(shard.bytes for shard in shards)) > limit:
            offer = f"the host offers {size:,} bytes as the state of stage {which}"
            most = f"which takes at most {limit:,} with the settings of this run"
            raise CheckpointError(f"{offer}, {most}: nothing of it is fetched")
        # The names end in that of the first stage, for a machine may hold others too.
        step, first, folder = manifest["step"], min(stages), ck.checkpoints_folder(run_folder)
        partial, final = folder / f".fetching-{first}", folder / f"step-{step:08d}-{first}"
        parts = {partial / f"{shard.sha256}.part": shard for shard in shards}
        _make_room(partial, parts)
        done = 0
        for part, shard in parts.items():
            want, before = Want(step, 0, shard.sha256, shard.bytes), done
            try:
                take(talk, want, part, lambda n, before=before: progress(before + n, size))  # type: ignore[misc]
            except CheckpointError as error:
                raise CheckpointError(f"{shard.file} of step {step}: {error}") from error
            done += shard.bytes
        for part, shard in parts.items():
            part.rename(partial / shard.file)
        write_file(partial / ck.MANIFEST, json.dumps(manifest, indent=1).encode())
        for earlier in folder.glob(f"step-*-{first}"):
            shutil.rmtree(earlier)
        put_in_place(partial, final)
        return ck.Checkpoint.open(final).folder
    except OSError as error:
        lost = f"the checkpoint cannot be kept in {run_folder}: {error}"
        raise CheckpointError(f"{lost}. Free some space, or choose another folder") from error
    finally:
        pipe.close()


def _checked_manifest(manifest: dict[str, Any], plugins: Collection[str]) -> list[ck.Shard]:
    """The files of a seat, none of which can lie or lead anywhere but beside the manifest."""
    try:
        checked = msgspec.convert(manifest, ck.Facts)
        codec = msgspec.convert(checked.settings.get("codec", {}), dict[str, Any])
        named = msgspec.convert(codec.get("plugins", []), set[str])
        if len({shard.file for shard in checked.shards}) < len(checked.shards):
            raise ValueError("it names a file twice")
    except ValueError as error:
        why = printable(str(error), 200)
        raise CheckpointError(f"the host's manifest cannot be used: {why}") from None
    if unknown := named - set(plugins):
        names = ", ".join(sorted(printable(name, 80) for name in unknown))
        code = f"the host's checkpoint names plugins, which are code: {names}"
        raise CheckpointError(f"{code}. If you trust them, join with --allow-plugin NAME for each")
    return checked.shards


def _make_room(partial: Path, parts: dict[Path, ck.Shard]) -> None:
    """Remove other parts, use what is here, refuse what takes more than half of the free disk."""
    partial.mkdir(parents=True, exist_ok=True)
    for path in {*partial.iterdir()} - parts.keys():
        path.unlink()
    rest = 0
    for part, shard in parts.items():
        for own in partial.parent.glob("*step-*/stage-*.safetensors"):
            with contextlib.suppress(OSError):  # it has just been removed
                if own.stat().st_size == shard.bytes and ck.sha256_of(own) == shard.sha256:
                    _link_or_copy(own, part)
                    flush(part)
                    break  # others of that size need not be read
        rest += shard.bytes - (part.stat().st_size if part.exists() else 0)
    if rest > (free := free_disk(partial)) // 2:
        place = f"{free:,} are free in {partial.parent}: the run leaves half of them free"
        way = "Free some space, or join with another --folder"
        raise CheckpointError(
            f"the state of the stage takes {rest:,} more bytes, but {place}. {way}"
        )
